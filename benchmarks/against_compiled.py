"""An operator by kernels against PyTorch's operators compiled: times in one process, and errors of both."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch._dynamo
from cuts import time_cuts
from torch import Tensor

BANDWIDTH = 4.2e6  # bytes of a microsecond, as an H200 copies
FEW = 16  # images that errors are taken of

Operator = Callable[..., Tensor]


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
