"""How the sides of a row are measured: each in several modes, all in turns, the fastest mode of each counts."""

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from registry import Setting
from torch import Tensor, nn

from gsanet.bench import milliseconds, one_line

Run = Callable[[], object]
Modes = Mapping[str, Run]
# A network's name: what makes it. Making may fail, for one side without the others.
Sides = Mapping[str, Callable[[], Modes]]

FLUSHED = 2**29  # bytes: several times the cache of any GPU


class Share:
    """One process's share of all sides, each of which is only compiled: `torch.compile` keeps on disk what it makes.

    Args:
        number: Of the process.
        processes: All of them.
    """

    def __init__(self, number: int, processes: int):
        self.number, self.processes = number, processes
        self.seen: dict[Any, int] = {}

    def take(self, sides: Sides) -> None:
        """Run those of these sides that are this process's, once. Those of other rows may be the same."""
        for make in sides.values():
            key = _compiled_as(make)
            if key in self.seen:
                continue
            self.seen[key] = len(self.seen)
            if self.seen[key] % self.processes != self.number:
                continue
            try:
                for run in make().values():
                    if not isinstance(run, Graphed):
                        run()
            except Exception as error:  # it will be reported when it is measured
                print(one_line(error))
            forget()


def _compiled_as(make: Any) -> Any:
    """What two ways to make a side have in common if the same is compiled for both."""
    if isinstance(make, partial):  # two partials of the same are not equal
        keywords = ((name, _compiled_as(value)) for name, value in make.keywords.items())
        return (make.func, *map(_compiled_as, make.args), *keywords)
    return replace(make, graphs=False) if isinstance(make, Setting) else make  # graphs replay what was compiled


share: Share | None = None  # of this process, if it is here to compile


@dataclass
class Measured:
    """Times in milliseconds of one run, the mode of each, and what failed."""

    times: dict[str, float] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def per_second(self, batches: Mapping[str, int]) -> dict[str, float]:
        """Images a second, from the batch of each side."""
        return {side: 1e3 * batches[side] / time for side, time in self.times.items()}

    def only(self, *sides: str) -> "Measured":
        """What was found of some sides."""
        measured = [side for side in sides if side in self.times]
        return Measured(
            {side: self.times[side] for side in measured},
            {side: self.modes[side] for side in measured},
            {
                name: error
                for name, error in self.errors.items()
                if any(f"{name}, ".startswith(f"{side}, ") for side in sides)
            },
        )


def measure(sides: Sides, setting: Setting, repeats: int = 1, cold: bool = False) -> Measured:
    """Time all modes of all sides in turns, and take the fastest mode of each side.

    Args:
        sides: What makes the modes of each side.
        setting: How long, and where.
        repeats: On a GPU, runs timed together, so that it is never waiting for the first call of a run.
        cold: On a GPU, write over its cache before each turn.
    """
    found = Measured()
    if share is not None:
        share.take(sides)
        return found
    runs: dict[tuple[str, str], Run] = {}
    repeats = repeats if setting.cuda else 1
    for side, make in sides.items():
        try:
            runs.update({(side, mode): partial(_repeat, run, repeats) for mode, run in make().items()})
        except Exception as error:  # whatever is wrong with one side, the others are measured
            found.errors[side] = one_line(error)
    keys = {", ".join(key): key for key in runs}

    def fail(name: str, error: Exception) -> None:
        found.errors[name] = one_line(error)

    prepare = _flush() if cold and setting.cuda else lambda: None
    steps = {name: runs[key] for name, key in keys.items()}
    times = milliseconds(steps, setting.device, setting.seconds, fail, prepare=prepare)
    for name, time in sorted(times.items(), key=lambda item: item[1], reverse=True):  # the fastest is last, and stays
        side, mode = keys[name]
        found.times[side], found.modes[side] = time / repeats, mode
    found.times = {side: found.times[side] for side in sides if side in found.times}
    return found


def _repeat(run: Run, repeats: int) -> None:
    for _ in range(repeats):
        run()


def _flush() -> Run:
    """Something that fills the cache, and keeps the GPU busy until the run that follows has been launched."""
    return torch.empty(FLUSHED, dtype=torch.uint8, device="cuda").zero_


def compiled(model: nn.Module, setting: Setting, mode: str | None = None) -> Any:
    """The network through `torch.compile`, for the one shape it is called with."""
    if not setting.compiled:
        return model
    # Networks of one class share the code that is compiled anew for each. Past the limit PyTorch would run them as they
    # are, and say nothing.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, dynamic=False, mode=mode)


def compiled_modes(model: nn.Module, setting: Setting) -> dict[str, Any]:
    """The network in each way of compiling it that the setting asks for."""
    modes = {"compiled" if setting.compiled else "eager": compiled(model, setting)}
    if setting.compiled and not setting.cuda:  # where compiling does not always pay
        modes["eager"] = model
    if setting.autotune and setting.compiled:
        modes["autotuned"] = compiled(model, setting, "max-autotune-no-cudagraphs")
    return modes


class Graphed:
    """A run as a CUDA graph: captured at the first call, and replayed."""

    def __init__(self, run: Run):
        self.run = run
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Replay it."""
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles, and makes all state, such as momentum
                for _ in range(3):
                    self.run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
            self.graph = graph
        self.graph.replay()


def with_graphs(modes: Modes, setting: Setting) -> dict[str, Run]:
    """Each run as it is and, if the setting asks for it, as a CUDA graph."""
    runs = dict(modes)
    if setting.graphs and setting.cuda:
        runs.update({f"{mode}, CUDA graph": Graphed(run) for mode, run in modes.items()})
    return runs


def images(setting: Setting, batch: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random images, channels-last."""
    made = torch.randn(batch, 3, size, size, device=setting.device, dtype=dtype)
    return made.to(memory_format=torch.channels_last)


_shared: dict[Any, Any] = {}


def shared(key: Any, make: Callable[[], Modes]) -> Modes:
    """What was made under this key before, or is made now: until `forget`."""
    if key not in _shared:
        _shared[key] = make()
    return _shared[key]


def forget() -> None:
    """Let go of all that is shared or was compiled, and of the memory that nothing holds any more."""
    _shared.clear()
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best: bytes a second of a copy, read and write, and operations a second."""

    bytes_per_second: float
    operations_per_second: float


@functools.cache
def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large matrix product, measured once in a run."""
    cuda = device == "cuda"
    size, side = (2**30, 8192) if cuda else (2**26, 1024)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    runs: dict[str, Run] = {
        "copy": partial(_repeat, partial(target.copy_, source), 5),
        "product": partial(_repeat, partial(torch.matmul, left, right), 5),
    }
    times = milliseconds(runs, device, 0.1)
    return Ceilings(5 * 2 * size / times["copy"] * 1e3, 5 * 2 * side**3 / times["product"] * 1e3)
