"""The backends of one operation: which exist, which is used, and why.

A backend is a pair of functions over tensors that were already checked, and a function that says what it cannot do; it
may also have one for the whole module. They stand in `BACKENDS` in the order in which they are tried; what one refuses
goes to the next, so that a faster backend never has to be complete, and the last ones take everything.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Axis = Literal["column", "row"]
Operation = Literal["content_attention", "positional_attention", "global_self_attention_map"]
Norm = Callable[[Tensor], Tensor]


def _refuses_whole_modules(operation: Operation, *arguments: Any, **settings: Any) -> str | None:
    return "it computes a module layer by layer" if operation == "global_self_attention_map" else None


@dataclass(frozen=True)
class Backend:
    """One implementation of both attention layers; `refuses` gives the reason why it cannot take a call, or None."""

    name: str
    content_attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    positional_attention: Callable[[Tensor, Tensor, Tensor, Axis, int | None], Tensor]
    refuses: Callable[..., str | None] = _refuses_whole_modules
    attention_map: Callable[..., Tensor] | None = None


BACKENDS: dict[str, Backend] = {}

# A plain global: gradient checkpointing calls forward again from autograd's own threads, which would not see a
# thread's or a context's own variable, and torch.compile guards on it.
_preferred: str | None = None


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Prefer one backend inside a `with` block, in the whole process.

    Args:
        name: `"fused"`, `"native"`, `"torch"` or `"reference"`.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: the backends here are {', '.join(map(repr, BACKENDS))}")
    global _preferred
    before, _preferred = _preferred, name
    try:
        yield
    finally:
        _preferred = before


def may_use(name: str) -> bool:
    """Whether no other backend is preferred."""
    return _preferred in (None, name)


def select_backend(operation: Operation, *tensors: Tensor) -> Backend:
    """The backend that takes this call: the preferred one, or the first in order that does not refuse."""
    if _preferred is not None and BACKENDS[_preferred].refuses(operation, *tensors) is None:
        return BACKENDS[_preferred]
    for backend in BACKENDS.values():
        if backend.refuses(operation, *tensors) is None:
            return backend
    raise RuntimeError(f"no backend takes {operation} of {[tuple(t.shape) for t in tensors]}")


def select_whole(*arguments: Any, **settings: Any) -> Callable[..., Tensor] | None:
    """The function of a backend that takes a whole module, or None: layer by layer."""
    candidates = BACKENDS.values() if _preferred is None else (BACKENDS[_preferred],)
    for backend in candidates:
        if backend.refuses("global_self_attention_map", *arguments, **settings) is None:
            return backend.attention_map
    return None


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether a call with these tensors has a backward pass."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def explain_backend(operation: Operation, *arguments: Any, **settings: Any) -> str:
    """Say in one sentence which backend a call uses, and why.

    Args:
        operation: `"content_attention"`, `"positional_attention"` or `"global_self_attention_map"`.
        arguments: The tensors of the call, in its order; for the last operation all its positional arguments.
        settings: Of the last operation, its other arguments.
    """
    if operation not in get_args(Operation):
        raise ValueError(f"unknown operation {operation!r}: one of {', '.join(map(repr, get_args(Operation)))}")
    if operation == "global_self_attention_map":
        return _explain_whole(*arguments, **settings)
    tensors = arguments
    chosen = select_backend(operation, *tensors).name
    if chosen == _preferred:
        return f"{chosen}: asked for by use_backend"
    passed_over = [_preferred] if _preferred else []
    passed_over += [name for name in list(BACKENDS)[: list(BACKENDS).index(chosen)] if name != _preferred]
    reasons = [f"{name} refuses: {BACKENDS[name].refuses(operation, *tensors)}" for name in passed_over]
    return f"{chosen}: {'; '.join(reasons) or 'the first choice, and it takes this call'}"


def _explain_whole(*arguments: Any, **settings: Any) -> str:
    reasons: list[str] = []
    for name in [_preferred] if _preferred else [name for name, backend in BACKENDS.items() if backend.attention_map]:
        reason = BACKENDS[name].refuses("global_self_attention_map", *arguments, **settings)
        if reason is None:
            return "; ".join([f"{name}: in one call", *reasons])
        reasons.append(f"{name} refuses: {reason}")
    return f"layer by layer: {'; '.join(reasons)}"
