"""Ctrl-C, and the signal by which a cluster takes a machine back, as a wish that the loop sees between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

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
