"""One module alone: at the stage shapes of a ResNet, beside its floor and its rivals, and from small maps to large."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from measure import Graphed, Modes, Run, ceilings, compiled, measure
from registry import Row, Setting, case
from rivals import GsaPytorch, SoftmaxAttention
from torch import Tensor, nn

import gsanet
from gsanet.bench import one_line, peak_mebibytes
from gsanet.functional import use_backend

OURS = "gsanet"
SOFTMAX = "softmax attention"
HEADS = 8
# (size of the map, channels): the four residual groups of a ResNet at 224x224, and at 64x64 with the 7x7/2 stem.
STAGES = [(56, 64), (28, 128), (14, 256), (7, 512), (32, 64), (16, 128), (8, 256), (4, 512)]
SIZES = [14, 28, 56, 112, 160, 256]
LARGEST_ON_A_CPU = 56
SCALING_CHANNELS = 64


def byte_floor(batch: int, size: int, channels: int, element: int, backward: bool) -> int:
    """The bytes that must move through memory, whatever the implementation: inputs are read once, outputs written once.

    With N = batch * size * size pixels, C channels, W = 3 C^2 + 2 (2 size - 1) C / 8 weights, in elements:

    forward             2 N C + W       x is read, y is written
    forward + backward  5 N C + 3 W     x, y; then x and dy are read, dx is written; weights twice, their gradients once

    A second reading of x or dy, which the statistics of batch normalisation ask for when a map does not fit on the
    chip, is not counted: it could be avoided on a larger chip.
    """
    maps = batch * size**2 * channels
    weights = 3 * channels**2 + 2 * (2 * size - 1) * channels // HEADS
    return element * (5 * maps + 3 * weights if backward else 2 * maps + weights)


def operations(batch: int, size: int, channels: int, backward: bool) -> int:
    """Multiplications and additions of the products: projection, content and both axes; backward is twice that."""
    pixels = batch * size**2
    forward = pixels * channels * (6 * channels + 4 * channels // HEADS + 4 * 2 * size)
    return 3 * forward if backward else forward


class ModuleRun:
    """One module on one map, under autocast: forward in evaluation, or forward and backward in training.

    Args:
        module: As it is called, compiled or not.
        x: The map.
        dtype: Of autocast.
        backward: Whether all gradients are taken, the map's and the weights'.
        backend: Preferred for ours.
    """

    def __init__(self, module: Any, x: Tensor, dtype: torch.dtype, backward: bool, backend: str | None = None):
        self.module, self.dtype, self.backward, self.backend = module, dtype, backward, backend
        self.x = x.detach().requires_grad_(backward)
        self.gradient = torch.randn_like(x)
        self.parameters = [self.x, *module.parameters()]

    def __call__(self) -> None:
        """Once; nothing is kept."""
        if self.module.training != self.backward:
            self.module.train(self.backward)
        autocast = torch.autocast(self.x.device.type, self.dtype, enabled=self.dtype != torch.float32)
        preferring = nullcontext() if self.backend is None else use_backend(self.backend)
        with torch.set_grad_enabled(self.backward), autocast, preferring:
            out = self.module(self.x)
        if self.backward:
            torch.autograd.grad(out, self.parameters, self.gradient.to(out.dtype))


def _modes(run: Run, setting: Setting, mode: str) -> Modes:
    """As it is, and as a CUDA graph: a small module would otherwise be timed by how fast it is launched."""
    return {mode: run, f"{mode}, CUDA graph": Graphed(run)} if setting.cuda else {mode: run}


def _side(
    make: Callable[[], nn.Module], x: Tensor, setting: Setting, backward: bool, compile_it: bool, backend: str | None
) -> Modes:
    module: Any = make().to(setting.device).to(memory_format=torch.channels_last)
    if compile_it:
        module = compiled(module, setting)
    run = ModuleRun(module, x, setting.dtype, backward, backend)
    return _modes(run, setting, "compiled" if compile_it and setting.compiled else "eager")


def _map(setting: Setting, batch: int, size: int, channels: int) -> Tensor:
    x = torch.randn(batch, channels, size, size, device=setting.device, dtype=setting.dtype)
    return x.to(memory_format=torch.channels_last)


@case("module", "module")
def module(setting: Setting) -> Iterator[Row]:
    """One module at the stage shapes: ours, its floors, the compiled reference, gsa-pytorch and softmax attention.

    Softmax attention is not compiled, being one large kernel and a projection; neither is gsa-pytorch, which would take
    minutes at eight shapes (the case `gsa-pytorch` has it compiled). On a GPU the cache is cold.
    """
    ceiling = ceilings(setting.device, setting.dtype)
    setting = replace(setting, seconds=setting.seconds / 5)
    for size, channels in STAGES:
        x = _map(setting, setting.batch, size, channels)
        gsa = partial(gsanet.GlobalSelfAttention, channels, feat_size=size, num_heads=HEADS)
        for backward in (False, True):
            side = partial(_side, x=x, setting=setting, backward=backward)
            sides: dict[str, Callable[[], Modes]] = {
                OURS: partial(side, gsa, compile_it=True, backend=None),
                "reference": partial(side, gsa, compile_it=True, backend="reference"),
                "gsa-pytorch": partial(
                    side, partial(GsaPytorch, channels, size, num_heads=HEADS), compile_it=False, backend=None
                ),
                SOFTMAX: partial(side, partial(SoftmaxAttention, channels, HEADS), compile_it=False, backend=None),
            }
            found = measure(sides, setting, cold=True)
            moved = byte_floor(setting.batch, size, channels, x.element_size(), backward)
            floors = {
                "bytes": 1e3 * moved / ceiling.bytes_per_second,
                "operations": 1e3 * operations(setting.batch, size, channels, backward) / ceiling.operations_per_second,
            }
            what = f"{size}x{size}x{channels}, {'forward + backward' if backward else 'forward'}"
            yield Row(what, "ms", found.times, OURS, "lower", None, found.modes, found.errors, floors)
        torch.compiler.reset()  # one shape's compiled code is no use to the next


@case("scaling", "scaling")
def scaling(setting: Setting) -> Iterator[Row]:
    """One module of 64 channels from 14x14 to 256x256 pixels, forward and backward, against softmax attention."""
    setting = replace(setting, seconds=setting.seconds / 5)
    for size in SIZES:
        if not setting.cuda and size > LARGEST_ON_A_CPU:
            break
        batch = max(1, setting.batch * SIZES[0] ** 2 // size**2)
        x = _map(setting, batch, size, SCALING_CHANNELS)
        gsa = partial(gsanet.GlobalSelfAttention, SCALING_CHANNELS, feat_size=size, num_heads=HEADS)
        softmax = partial(SoftmaxAttention, SCALING_CHANNELS, HEADS)
        side = partial(_side, x=x, setting=setting, backward=True, backend=None)
        sides: dict[str, Callable[[], Modes]] = {
            OURS: functools.cache(partial(side, gsa, compile_it=True)),
            SOFTMAX: functools.cache(partial(side, softmax, compile_it=False)),
        }
        found = measure(sides, setting, cold=True)
        times = {name: time / batch for name, time in found.times.items()}
        yield Row(f"{size}x{size}, time", "ms/image", times, OURS, "lower", None, found.modes, found.errors)
        if setting.cuda:
            yield _memory_row(f"{size}x{size}, memory", sides, batch)
        torch.compiler.reset()


def _memory_row(what: str, sides: dict[str, Callable[[], Modes]], batch: int) -> Row:
    values: dict[str, float] = {}
    modes: dict[str, str] = {}
    errors: dict[str, str] = {}
    for name, make in sides.items():
        try:
            modes[name], run = next(iter(make().items()))
            values[name] = peak_mebibytes(run) / batch
        except Exception as error:
            errors[name] = one_line(error)
    return Row(what, "MiB/image", values, OURS, "lower", None, modes, errors)


@case("ceilings", "ceilings")
def ceilings_of_the_machine(setting: Setting) -> Iterator[Row]:
    """What the machine can do at best: a large copy and a large matrix product."""
    found = ceilings(setting.device, setting.dtype)
    yield Row("Copy, read and write", "GB/s", {"copy": found.bytes_per_second / 1e9}, "copy", "higher")
    rate = found.operations_per_second / 1e12
    yield Row("Matrix product", "TFLOP/s", {"product": rate}, "product", "higher")
