"""Cuts of a kernel, and what PyTorch does in its place: timed with a cold cache, and printed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from measure import FLUSHED, Graphed
from projections import launched

from gsanet.bench import milliseconds, one_line
from gsanet.functional.fused.compiler import architecture_of, compile_all

Cut = TypeVar("Cut", bound=NamedTuple)


def time_cuts(
    usual: Mapping[str, Callable[[], object]], runs: Mapping[Cut, Callable[[], object]]
) -> tuple[dict[str, float], dict[Cut, float]]:
    """Microseconds of all that is usual, by name, and of a kernel with each cut that works."""
    compile_all([launch.kernel for run in runs.values() for launch in launched(run)], architecture_of(_device()))
    names = {_name(cut): cut for cut in runs}
    sides = {name: Graphed(run) for name, run in usual.items()} | {_name(cut): Graphed(runs[cut]) for cut in runs}
    # The cache is cold, and full of what need not be written to memory first.
    cold = torch.zeros(FLUSHED // 4, device=_device()).sum
    times = milliseconds(sides, "cuda", 0.02, lambda side, error: print(f"  {side}: {one_line(error)}"), prepare=cold)
    before = {name: 1e3 * times.pop(name) for name in usual}
    return before, {names[name]: 1e3 * time for name, time in times.items()}


def print_usual(what: str, usual: Mapping[str, float], moved: float) -> float:
    """A line about all that PyTorch does, one after the other, in microseconds; gives the sum.

    Args:
        what: The shape, in words.
        usual: As from `time_cuts`.
        moved: Bytes that one kernel reads and writes.
    """
    total = sum(usual.values())
    steps = ", ".join(f"{name} {time:.0f}" for name, time in usual.items())
    print(f"{what}: {total:.0f} us by PyTorch, {steps}; bytes {moved / 4.2e6:.0f}")
    return total


def print_cuts(times: Mapping[Cut, float], usual: float, planned: Cut | None) -> None:
    """A line for each cut, the fastest first; times in microseconds."""
    for cut, time in sorted(times.items(), key=lambda item: item[1]):
        plan = "as planned" if cut == planned else "not the plan"
        print(f"  {time:.0f} us, {usual / time:.2f} times faster, {plan}: {_name(cut)}")


def worth_trying(planned: Cut | None, tried: list[Cut], every: bool) -> list[Cut]:
    """The planned cut and, if `every` one is asked for, the others."""
    return list(dict.fromkeys([*([] if planned is None else [planned]), *(tried if every else [])]))


def _name(cut: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in cut._asdict().items())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
