"""Axial attention by its kernels, against the compiled products of PyTorch: timed forward, and forward and backward.

    python benchmarks/axial.py
    python benchmarks/axial.py --batch 128 --images 224

At the shapes of `axial_resnet50`, in bfloat16, along columns and along rows, as CUDA graphs with a cold cache, all in
one process and in turns. Each line has the times, their ratio, what the maps' bytes alone would take, and the relative
errors of output and gradients of both ways against PyTorch's operators in float32. Needs a GPU.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from against_compiled import compare, compare_network
from torch import Tensor

from gsanet.functional.axial import attend_by_products
from gsanet.functional.fused import axial as fused

HEADS = 8


class Case(NamedTuple):
    """Pixels of a side, channels of a head, and how many modules of the network are such."""

    side: int
    width: int
    times: int


# By pixels of the images' side.
CASES = {
    64: [
        Case(32, 8, 3), Case(32, 16, 1), Case(16, 16, 3), Case(16, 32, 1), Case(8, 32, 5), Case(8, 64, 1),
        Case(4, 64, 2),
    ],
    224: [
        Case(56, 8, 3), Case(56, 16, 1), Case(28, 16, 3), Case(28, 32, 1), Case(14, 32, 5), Case(14, 64, 1),
        Case(7, 64, 2),
    ],
}  # fmt: skip


def tensors(case: Case, batch: int, turned: bool, device: str = "cuda") -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values as parts of one projection, a table; and a gradient of the output."""
    torch.manual_seed(0)
    size, channels = (batch, case.side, case.side), HEADS * case.width
    projected = torch.randn(*size, 3 * channels, device=device).bfloat16()
    maps = [part.unflatten(-1, (HEADS, case.width)) for part in projected.split(channels, dim=-1)]
    table = torch.randn(2 * case.side - 1, case.width, device=device).bfloat16()
    d_out = torch.randn(*size, HEADS, case.width, device=device).bfloat16()
    if turned:
        maps, d_out = [one.transpose(1, 2) for one in maps], d_out.transpose(1, 2)
    return [one.requires_grad_() for one in (*(one.detach() for one in maps), table)], d_out


def compare_case(case: Case, batch: int, turned: bool) -> dict[str, float]:
    """Time both ways at one shape, and print; microseconds of forward and backward by name."""
    inputs, d_out = tensors(case, batch, turned)
    axis = "rows" if turned else "columns"
    title = f"{case.side}x{case.side}, heads of {case.width}, {axis} ({case.times} modules)"
    unit = 2 * batch * case.side**2 * HEADS * case.width
    return compare(title, fused.axial_attention, attend_by_products, inputs, d_out, (4 * unit, 11 * unit))


def times(case: Case, batch: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Along columns, then along rows."""
    for turned in (False, True):
        yield case.times, compare_case(case, batch, turned)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all shapes, and add up a step of the network."""
    compare_network(__doc__, CASES, times, arguments)


if __name__ == "__main__":
    main()
