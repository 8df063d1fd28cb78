"""Timing two or more ways of doing one thing, side by side in one process."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def milliseconds(sides: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, float]:
    """The median time of each side.

    The sides take turns, so that a change in the machine's load meets all of them alike; each is run once before.
    """
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds * len(sides)
    while time.perf_counter() < end or len(times[next(iter(sides))]) < 3:
        for name, run in sides.items():
            times[name].append(_once(run, device))
    return {name: statistics.median(values) for name, values in times.items()}


def _once(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def peak_mebibytes(run: Callable[[], object]) -> float:
    """The most memory that PyTorch held on the GPU during a run, over what it held before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
