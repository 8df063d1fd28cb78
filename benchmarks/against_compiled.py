"""An operator by kernels against PyTorch's operators compiled: times in one process, and errors of both."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch._dynamo
from cuts import time_cuts
from torch import Tensor

from gsanet.bench import environment

BANDWIDTH = 4.2e6  # bytes of a microsecond, as an H200 copies
FEW = 16  # images that errors are taken of

Operator = Callable[..., Tensor]
Case = TypeVar("Case")


def both(operator: Operator, inputs: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = operator(*inputs)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def forward(operator: Operator, inputs: Sequence[Tensor]) -> Tensor:
    """The output alone."""
    with torch.no_grad():
        return operator(*inputs)


def error(operator: Operator, usual: Operator, inputs: Sequence[Tensor], d_out: Tensor) -> float:
    """The largest relative error of output and gradients against the usual way in float32, of a few images."""
    few = [one.detach()[:FEW] if one.dim() >= 4 else one.detach() for one in inputs]
    found = both(operator, [one.requires_grad_() for one in few], d_out[:FEW])
    exact = both(usual, [one.detach().float().requires_grad_() for one in few], d_out[:FEW].float())
    pairs = zip(found, exact, strict=True)
    return max(((one.float() - other).norm() / other.norm()).item() for one, other in pairs)


def compare(
    title: str, kernels: Operator, usual: Operator, inputs: Sequence[Tensor], d_out: Tensor, floors: tuple[float, float]
) -> dict[str, float]:
    """Time both ways, and print; microseconds of forward and backward by name.

    Args:
        title: What is compared.
        kernels: One way.
        usual: The other, which is compiled.
        inputs: Leaves; those with four dimensions or more are of a batch.
        d_out: A gradient of the output.
        floors: Bytes that must be moved forward, and forward and backward.
    """
    torch._dynamo.reset()
    ways: dict[str, Operator] = {"kernels": kernels, "compiled": torch.compile(usual, dynamic=False)}
    runs: dict[str, Callable[[], object]] = {
        f"{name} forward": partial(forward, way, inputs) for name, way in ways.items()
    }
    runs |= {f"{name} both": partial(both, way, inputs, d_out) for name, way in ways.items()}
    times, _ = time_cuts(runs, {})
    print(f"{title}:")
    for what, floor in zip(("forward", "both"), floors, strict=True):
        mine, theirs = times.get(f"kernels {what}", float("nan")), times.get(f"compiled {what}", float("nan"))
        print(
            f"  {what}: {mine:.0f} us, compiled {theirs:.0f}, {theirs / mine:.2f} times faster; "
            f"bytes {floor / BANDWIDTH:.0f}"
        )
    errors = ", ".join(f"{name} {error(way, usual, inputs, d_out):.1e}" for name, way in ways.items())
    print(f"  relative errors: {errors}", flush=True)
    return {name.removesuffix(" both"): time for name, time in times.items() if name.endswith(" both")}


def compare_network(
    description: str | None,
    cases: Mapping[int, Sequence[Case]],
    times: Callable[[Case, int], Iterable[tuple[int, dict[str, float]]]],
    arguments: Sequence[str] | None,
) -> None:
    """A command: compare all shapes of a network, and add up a training step of it.

    Args:
        description: What the command says of itself.
        cases: By pixels of the images' side.
        times: Compares a case at a batch size: how many modules are such, and times of one as from `compare`.
        arguments: Of the command; None: those it was called with.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=64, choices=cases, help="pixels of their side")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the kernels need a GPU")
    print(", ".join(f"{name} {value}" for name, value in environment("cuda").items()))
    total: dict[str, float] = {}
    for case in cases[options.images]:
        for modules, found in times(case, options.batch):
            for name, time in found.items():
                total[name] = total.get(name, 0.0) + modules * time
    print("all modules of a training step: " + ", ".join(f"{name} {time / 1e3:.2f} ms" for name, time in total.items()))
