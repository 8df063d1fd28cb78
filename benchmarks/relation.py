"""Local relation by its kernels, against the compiled operators of PyTorch: timed forward, and forward and backward.

    python benchmarks/relation.py
    python benchmarks/relation.py --batch 128 --images 224

At the shapes of `lr_resnet50`, values in bfloat16, as CUDA graphs with a cold cache, all in one process and in turns.
Each line has the times, their ratio, what the maps' bytes alone would take, and the relative errors of output and
gradients of both ways against PyTorch's operators in float32. Needs a GPU.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from against_compiled import compare, compare_network
from torch import Tensor

from gsanet.functional.fused import relation as fused
from gsanet.functional.relation import relate_by_products

CHANNELS, WINDOW = 8, 7


class Case(NamedTuple):
    """Pixels of a side, heads, stride, and how many modules of the network are such."""

    side: int
    heads: int
    stride: int
    times: int


# By pixels of the images' side: at 64 the stem does not pool.
CASES = {
    size: [
        Case(side, 13, 1, 3), Case(side, 25, 2, 1), Case(side // 2, 25, 1, 3), Case(side // 2, 50, 2, 1),
        Case(side // 4, 50, 1, 5), Case(side // 4, 100, 2, 1), Case(side // 8, 100, 1, 2),
    ]
    for size, side in ((64, 32), (224, 56))
}  # fmt: skip


def tensors(case: Case, batch: int, device: str = "cuda") -> tuple[list[Tensor], Tensor]:
    """Queries, keys, the prior and values; and a gradient of the output."""
    torch.manual_seed(0)
    inner = -(-case.side // case.stride)
    size, small = (batch, case.side, case.side, case.heads), (batch, inner, inner, case.heads)
    q, k = torch.randn(small, device=device), torch.randn(size, device=device)
    prior = torch.randn(case.heads, WINDOW**2, device=device)
    v, d_out = (torch.randn(*shape, CHANNELS, device=device).bfloat16() for shape in (size, small))
    return [one.requires_grad_() for one in (q, k, prior, v)], d_out


def compare_case(case: Case, batch: int) -> dict[str, float]:
    """Time both ways at one shape, and print; microseconds of forward and backward by name."""
    inputs, d_out = tensors(case, batch)
    kernels, usual = (
        partial(way, window=WINDOW, stride=case.stride) for way in (fused.local_relation, relate_by_products)
    )
    q, k, _, v = (4 * one.numel() if one.dtype == torch.float32 else 2 * one.numel() for one in inputs)
    out = 2 * d_out.numel()
    title = f"{case.side}x{case.side}, {case.heads} heads, stride {case.stride} ({case.times} modules)"
    once = q + k + v + out
    # Backward both kernels read values, and gradients of the output; and marks are written and read.
    return compare(title, kernels, usual, inputs, d_out, (once, 3 * once + q + k + v + 8 * q))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all shapes, and add up a step of the network."""
    compare_network(__doc__, CASES, lambda case, batch: [(case.times, compare_case(case, batch))], arguments)


if __name__ == "__main__":
    main()
