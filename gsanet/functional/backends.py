"""The backends of one operation: which exist, which is used, and why.

A backend is a pair of functions over tensors that were already checked, and a function that says what it cannot do.
They stand in `BACKENDS` in the order in which they are tried; what one refuses goes to the next, so that a faster
backend never has to be complete, and the last ones take everything.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Axis = Literal["column", "row"]
Operation = Literal["content_attention", "positional_attention"]


def _refuses_nothing(operation: Operation, *tensors: Tensor) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of both attention layers; `refuses` gives the reason why it cannot take a call, or None."""

    name: str
    content_attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    positional_attention: Callable[[Tensor, Tensor, Tensor, Axis, int | None], Tensor]
    refuses: Callable[..., str | None] = _refuses_nothing


BACKENDS: dict[str, Backend] = {}

# A plain global: gradient checkpointing calls forward again from autograd's own threads, which would not see a
# thread's or a context's own variable, and torch.compile guards on it.
_preferred: str | None = None


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Prefer one backend inside a `with` block, in the whole process.

    Args:
        name: `"reference"` or `"torch"`.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: the backends here are {', '.join(map(repr, BACKENDS))}")
    global _preferred
    before, _preferred = _preferred, name
    try:
        yield
    finally:
        _preferred = before


def select_backend(operation: Operation, *tensors: Tensor) -> Backend:
    """The backend that takes this call: the preferred one, or the first in order that does not refuse."""
    if _preferred is not None and BACKENDS[_preferred].refuses(operation, *tensors) is None:
        return BACKENDS[_preferred]
    for backend in BACKENDS.values():
        if backend.refuses(operation, *tensors) is None:
            return backend
    raise RuntimeError(f"no backend takes {operation} of {[tuple(t.shape) for t in tensors]}")


def explain_backend(operation: Operation, *tensors: Tensor) -> str:
    """Say in one sentence which backend a call uses, and why.

    Args:
        operation: `"content_attention"` or `"positional_attention"`.
        tensors: The tensors of the call, in its order.
    """
    chosen = select_backend(operation, *tensors).name
    if chosen == _preferred:
        return f"{chosen}: asked for by use_backend"
    passed_over = [_preferred] if _preferred else []
    passed_over += [name for name in list(BACKENDS)[: list(BACKENDS).index(chosen)] if name != _preferred]
    reasons = [f"{name} refuses: {BACKENDS[name].refuses(operation, *tensors)}" for name in passed_over]
    return f"{chosen}: {'; '.join(reasons) or 'the first choice, and it takes this call'}"
