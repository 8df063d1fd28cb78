"""Axial attention by its kernels, against the compiled products of PyTorch: timed forward, and forward and backward.

    python benchmarks/axial.py
    python benchmarks/axial.py --batch 128 --images 224

At the shapes of `axial_resnet50`, in bfloat16, along columns and along rows, as CUDA graphs with a cold cache, all in
one process and in turns. Each line has the times, their ratio, what the maps' bytes alone would take, and the relative
errors of output and gradients of both ways against PyTorch's operators in float32. Needs a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch._dynamo
from cuts import time_cuts
from torch import Tensor

from gsanet.bench import environment
from gsanet.functional.axial import attend_by_products
from gsanet.functional.fused import axial as fused

HEADS = 8
BANDWIDTH = 4.2e6  # bytes of a microsecond, as an H200 copies
FEW = 16  # images that errors are taken of


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

Attend = Callable[..., Tensor]


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


def both(attend: Attend, inputs: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def forward(attend: Attend, inputs: Sequence[Tensor]) -> Tensor:
    """The output alone."""
    with torch.no_grad():
        return attend(*inputs)


def error(attend: Attend, inputs: Sequence[Tensor], d_out: Tensor) -> float:
    """The largest relative error of output and gradients, of a few images."""
    few = [one.detach()[:FEW] if one.dim() == 5 else one.detach() for one in inputs]
    found = both(attend, [one.requires_grad_() for one in few], d_out[:FEW])
    exact = both(attend_by_products, [one.detach().float().requires_grad_() for one in few], d_out[:FEW].float())
    pairs = zip(found, exact, strict=True)
    return max(((one.float() - other).norm() / other.norm()).item() for one, other in pairs)


def compare(case: Case, batch: int, turned: bool) -> dict[str, float]:
    """Time both ways at one shape, and print; microseconds of forward and backward by name."""
    torch._dynamo.reset()
    inputs, d_out = tensors(case, batch, turned)
    ways: dict[str, Attend] = {
        "kernels": fused.axial_attention,
        "compiled": torch.compile(attend_by_products, dynamic=False),
    }
    runs: dict[str, Callable[[], object]] = {
        f"{name} forward": partial(forward, way, inputs) for name, way in ways.items()
    }
    runs |= {f"{name} both": partial(both, way, inputs, d_out) for name, way in ways.items()}
    times, _ = time_cuts(runs, {})
    unit = 2 * batch * case.side**2 * HEADS * case.width / BANDWIDTH
    print(f"{case.side}x{case.side}, heads of {case.width}, {'rows' if turned else 'columns'} ({case.times} modules):")
    for what, units in (("forward", 4), ("both", 11)):
        mine, usual = times.get(f"kernels {what}", float("nan")), times.get(f"compiled {what}", float("nan"))
        print(
            f"  {what}: {mine:.0f} us, compiled {usual:.0f}, {usual / mine:.2f} times faster; bytes {units * unit:.0f}"
        )
    errors = ", ".join(f"{name} {error(way, inputs, d_out):.1e}" for name, way in ways.items())
    print(f"  relative errors: {errors}", flush=True)
    return {name.removesuffix(" both"): time for name, time in times.items() if name.endswith(" both")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all shapes, and add up a step of the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=64, choices=CASES, help="pixels of their side")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the kernels need a GPU")
    print(", ".join(f"{name} {value}" for name, value in environment("cuda").items()))
    total: dict[str, float] = {}
    for case in CASES[options.images]:
        for turned in (False, True):
            for name, time in compare(case, options.batch, turned).items():
                total[name] = total.get(name, 0.0) + case.times * time
    print("all modules of a training step: " + ", ".join(f"{name} {time / 1e3:.2f} ms" for name, time in total.items()))


if __name__ == "__main__":
    main()
