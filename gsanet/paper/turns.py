"""Runs that share a GPU, each timed with the GPU to itself.

Several runs at once use a GPU better than one. But how many images a second each of them then does says nothing about
its network. So a run asks for the GPU a few times, for some steps which it times; the others wait between two steps.
"""

import fcntl
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import torch


class Turns:
    """Called before each step of a run; leaves as soon as the context does.

    Two files are locked. Who computes holds `gpu` together with others, who is timed holds it alone. Who wants to be
    timed holds `gate`, so that the others notice and stop.

    Args:
        folder: That of the processes that share the GPU.
        starts: The steps at which to begin to measure.
        length: How many steps to measure each time.
        keep: Called with the seconds that they took.
    """

    def __init__(self, folder: Path, starts: Collection[int], length: int, keep: Callable[[float], None]) -> None:
        self.folder, self.starts, self.length, self.keep = folder, starts, length, keep
        self.first = True
        self.end: int | None = None  # the step at which this run's own turn ends
        self.began = 0.0

    def __enter__(self) -> "Turns":
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self.gpu, self.gate = (
                stack.enter_context((self.folder / f"{name}.lock").open("w")) for name in ("gpu", "gate")
            )
            self._files = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()  # which unlocks them

    def __call__(self, step: int) -> None:
        """Wait for one's turn.

        Args:
            step: How many the run has done.
        """
        if self.first:  # nothing is held: this step may compile for a minute
            self.first = False
        elif self.end is None and step in self.starts:
            self._finish_work()
            fcntl.flock(self.gpu, fcntl.LOCK_UN)
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.gpu, fcntl.LOCK_EX)
            self.end, self.began = step + self.length, time.perf_counter()
        elif self.end is not None:
            if step >= self.end:
                self._finish_work()
                self.keep(time.perf_counter() - self.began)
                self.end = None
                fcntl.flock(self.gpu, fcntl.LOCK_SH)
                fcntl.flock(self.gate, fcntl.LOCK_UN)
        else:
            try:
                fcntl.flock(self.gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                self._finish_work()
                fcntl.flock(self.gpu, fcntl.LOCK_UN)
                fcntl.flock(self.gate, fcntl.LOCK_SH)
            fcntl.flock(self.gpu, fcntl.LOCK_SH)
            fcntl.flock(self.gate, fcntl.LOCK_UN)

    def _finish_work(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
