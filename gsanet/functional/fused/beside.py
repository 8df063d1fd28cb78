"""Work beside other work: kernels that do not wait for each other, on two streams, where one leaves a GPU half idle."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

FEW = 8  # images, up to which kernels leave room for each other


def start_beside(work: Callable[[], Result], like: Tensor) -> tuple[Result, Callable[[], None]]:
    """Do some work on a stream of its own.

    Only for few images, and only while a CUDA graph is captured, where it costs nothing: without one, the way to
    another stream takes the host longer than the kernels of a few images run. Else it is done on the current stream.

    All that is allocated by the work is safe to use behind the wait, and to let go: whoever uses the stream next begins
    by waiting for the current one.

    Args:
        work: Launches kernels; nothing that it reads is written before the wait.
        like: A batch of images on the device in question.

    Returns:
        The result of the work, and what has the current stream wait for it.
    """
    if not like.is_cuda or like.shape[0] > FEW or not torch.cuda.is_current_stream_capturing():
        return work(), lambda: None
    current, other = torch.cuda.current_stream(like.device), _stream(like.device)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        result = work()
    return result, lambda: current.wait_stream(other)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
