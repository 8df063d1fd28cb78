"""The registry of cases. A case yields rows of measurements; the first side of a row is what the others are held to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gsanet
from gsanet.bench import milliseconds, peak_mebibytes
from gsanet.functional import use_backend


@dataclass(frozen=True)
class Setting:
    """What one run of the benchmarks is made at."""

    device: str
    dtype: torch.dtype
    batch: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """One thing measured on several sides, in one unit."""

    what: str
    unit: str
    sides: dict[str, float] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Each side's value over the first side's."""
        base = next(iter(self.sides.values()))
        return {name: value / base for name, value in self.sides.items()}


Case = Callable[[Setting], Iterator[Row]]
CASES: dict[str, Case] = {}

# (size of the map, channels): the four residual groups of a ResNet at 224x224, and at 64x64 with the 7x7/2 stem.
STAGES = [(56, 64), (28, 128), (14, 256), (7, 512), (32, 64), (16, 128), (8, 256), (4, 512)]


def case(function: Case) -> Case:
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


@case
def module(setting: Setting) -> Iterator[Row]:
    """One GSA module at the stage shapes: the backends, and PyPI's gsa-pytorch where it is installed."""
    for size, channels in STAGES:
        ours = gsanet.GlobalSelfAttention(channels, feat_size=size).to(setting.device)
        runs: dict[str, Callable[[Tensor], Tensor]] = {}
        for backend in ("torch", "reference"):
            runs[backend] = partial(_with_backend, backend, ours)
        if (other := _gsa_pytorch(size, channels)) is not None:
            runs["gsa-pytorch"] = other.to(setting.device)
        x = torch.randn(setting.batch, channels, size, size, device=setting.device)
        x = x.to(memory_format=torch.channels_last)
        for name, step in {"forward": _forward, "forward + backward": _forward_backward}.items():
            sides: dict[str, Callable[[], Any]] = {}
            for side, run in runs.items():
                # gsa-pytorch makes float32 tensors inside and does not run in other precisions.
                dtype = torch.float32 if side == "gsa-pytorch" else setting.dtype
                sides[side] = partial(step, run, x, dtype)
            what = f"{size}x{size}x{channels}, {name}"
            yield Row(what, "ms", milliseconds(sides, setting.device, setting.seconds))
            if setting.device == "cuda" and step is _forward_backward:
                yield Row(f"{what}, peak", "MiB", {side: peak_mebibytes(run) for side, run in sides.items()})


@case
def network(setting: Setting) -> Iterator[Row]:
    """GSA-ResNet-50 and the convolutional ResNet-50, eager: time of one batch at 224x224."""
    networks = {name: gsanet.create_model(name) for name in ("conv_resnet50", "gsa_resnet50")}
    x = torch.randn(setting.batch, 3, 224, 224, device=setting.device).to(memory_format=torch.channels_last)
    for model in networks.values():
        model.to(setting.device).to(memory_format=torch.channels_last)
    for name, step in {"inference": _forward, "training": _forward_backward}.items():
        for model in networks.values():
            model.train(name == "training")
        sides = {side: partial(step, model, x, setting.dtype) for side, model in networks.items()}
        what = f"ResNet-50, {name}, batch {setting.batch}"
        yield Row(what, "ms", milliseconds(sides, setting.device, setting.seconds))
        if setting.device == "cuda":
            yield Row(f"{what}, peak", "MiB", {side: peak_mebibytes(run) for side, run in sides.items()})


def _with_backend(backend: str, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with use_backend(backend):
        return run(x)


def _forward(run: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad(), torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32):
        run(x)


def _forward_backward(run: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> None:
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32):
        out = run(x)
    out.float().mean().backward()


def _gsa_pytorch(size: int, channels: int) -> nn.Module | None:
    try:
        from gsa_pytorch import GSA
    except ImportError:
        return None
    return GSA(dim=channels, dim_key=channels // 8, heads=8, rel_pos_length=size)
