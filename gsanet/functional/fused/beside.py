"""Work beside other work: kernels that do not wait for each other, on two streams, where one leaves a GPU half idle."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

FEW = 8  # images, up to which kernels leave room for each other


class Beside:
    """A stream of its own for some work, that begins behind what the current stream has been given so far.

    Only for few images, and only while a CUDA graph is captured, where it costs nothing: without one, the way to
    another stream takes the host longer than the kernels of a few images run. Else all is done on the current stream.

    All that is allocated by the work is safe to use behind the wait, and to let go: whoever uses the stream next begins
    by waiting for the current one.

    Args:
        like: A batch of images on the device in question.
    """

    def __init__(self, like: Tensor):
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if like.is_cuda and like.shape[0] <= FEW and torch.cuda.is_current_stream_capturing():
            current, other = self._streams = torch.cuda.current_stream(like.device), _stream(like.device)
            other.wait_stream(current)

    def run(self, work: Callable[[], Result]) -> Result:
        """Do the work, which launches kernels; nothing that it reads is written before the wait."""
        if self._streams is None:
            return work()
        with torch.cuda.stream(self._streams[1]):
            return work()

    def wait(self) -> None:
        """Have the current stream wait for the work."""
        if self._streams is not None:
            current, other = self._streams
            current.wait_stream(other)


def start_beside(work: Callable[[], Result], like: Tensor) -> tuple[Result, Callable[[], None]]:
    """Do some work on a stream of its own, as `Beside` does.

    Args:
        work: Launches kernels; nothing that it reads is written before the wait.
        like: A batch of images on the device in question.

    Returns:
        The result of the work, and what has the current stream wait for it.
    """
    beside = Beside(like)
    return beside.run(work), beside.wait


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
