"""Reading the loss without making the device wait."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

LAG = 2  # steps that the device may be behind when a loss is read


@dataclass(frozen=True)
class StepRecord:
    """A step that the device has done: its mean loss and rate, and what any process asks for."""

    step: int
    loss: float
    lr: float
    stop: bool
    save: bool


class StepLog:
    """The loss of each step, averaged over the processes and read `LAG` steps later.

    A process's wishes to stop or to save travel with it, so that all processes learn of them at the same step.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._pending: deque[tuple[int, float, Tensor, torch.Event | None]] = deque()

    def push(self, step: int, loss: Tensor, lr: float, *, stop: bool, save: bool) -> None:
        """Note the loss of a step, still on the device."""
        wishes = [torch.full_like(loss, float(wish)) for wish in (stop, save)]
        values = self._accelerator.reduce(torch.stack([loss, *wishes]), "mean")
        on_host = values.to("cpu", non_blocking=True)
        event = None
        if values.device.type != "cpu":
            event = torch.Event(values.device)
            event.record()
        self._pending.append((step, lr, on_host, event))

    def records(self, lag: int = LAG) -> Iterator[StepRecord]:
        """The steps that can be read, oldest first; with a lag of 0 all of them."""
        while len(self._pending) > lag:
            step, lr, on_host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            loss, stop, save = on_host.tolist()
            yield StepRecord(step, loss, lr, stop > 0, save > 0)
