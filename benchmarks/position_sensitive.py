"""Axial-DeepLab's attention by its kernels, against PyTorch's operators compiled: forward, and forward and backward.

    python benchmarks/position_sensitive.py
    python benchmarks/position_sensitive.py --batch 128 --images 224

At the shapes of `axial_deeplab_s`, in bfloat16, along columns and along rows, with the norm of scores in training,
which one way takes from sums of scores and the other from all scores; as CUDA graphs with a cold cache, all in one
process and in turns. Each line has the times, their ratio, what the maps' bytes alone would take, and the relative
errors of output and gradients of both ways against PyTorch's operators in float32. Needs a GPU.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from against_compiled import compare, compare_network
from torch import Tensor

from gsanet.layers.position_sensitive_attention import LineAttention

HEADS = 8


class Case(NamedTuple):
    """Pixels of a side, channels of a head's queries, and how many modules of the network are such."""

    side: int
    key: int
    times: int


# By pixels of the images' side: at 64 the stem does not pool.
CASES = {
    size: [
        Case(side, 4, 3), Case(side, 8, 1), Case(side // 2, 8, 3), Case(side // 2, 16, 1), Case(side // 4, 16, 5),
        Case(side // 4, 32, 1), Case(side // 8, 32, 2),
    ]
    for size, side in ((64, 32), (224, 56))
}  # fmt: skip


def tensors(case: Case, batch: int, turned: bool, device: str = "cuda") -> tuple[list[Tensor], Tensor]:
    """A projection to queries, keys and values, and a table; and a gradient of the output."""
    torch.manual_seed(0)
    size = batch, case.side, case.side
    pixels = torch.randn(*size, HEADS, 4 * case.key, device=device).bfloat16()
    table = torch.randn(2 * case.side - 1, 4 * case.key, device=device) * (2 * case.key) ** -0.5
    d_out = torch.randn(*size, 2, HEADS, 2 * case.key, device=device).bfloat16()
    if turned:
        pixels, d_out = pixels.transpose(1, 2), d_out.transpose(1, 2)
    return [pixels.requires_grad_(), table.requires_grad_()], d_out


def compare_case(case: Case, batch: int, turned: bool) -> dict[str, float]:
    """Time both ways at one shape, and print; microseconds of forward and backward by name."""
    inputs, d_out = tensors(case, batch, turned)
    channels = 2 * HEADS * case.key
    line = LineAttention(channels, channels, HEADS, device="cuda")
    title = f"{case.side}x{case.side}, queries of {case.key}, {'rows' if turned else 'columns'} ({case.times} modules)"
    unit = 2 * inputs[0].numel()
    # Sums of scores read queries and keys, half of the map; their gradient reads and writes as much.
    floors = (2.5 * unit, 6.5 * unit)
    by_moments = torch.compile(line._attend_by_moments, dynamic=False)
    return compare(title, by_moments, line._attend_by_scores, inputs, d_out, floors)


def times(case: Case, batch: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Along columns, then along rows."""
    for turned in (False, True):
        yield case.times, compare_case(case, batch, turned)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all shapes, and add up a step of the network."""
    compare_network(__doc__, CASES, times, arguments)


if __name__ == "__main__":
    main()
