"""Ctrl-C, the signal by which a cluster takes a machine back, and a time limit, as a wish seen between two steps."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets a wish; a second one ends the process at once.

    Args:
        deadline: When to stop in any case, as `time.monotonic()` counts. None: never.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    @property
    def wish(self) -> signal.Signals | None:
        """What asks to stop: the signal that came, or SIGALRM when the time is up."""
        if self.received is None and self.deadline is not None and time.monotonic() >= self.deadline:
            return signal.SIGALRM
        return self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
