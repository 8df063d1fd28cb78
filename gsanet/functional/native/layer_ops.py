"""The two layers as operators of PyTorch on a CPU, with autograd, and fake implementations for torch.compile."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gsanet.functional import lean
from gsanet.functional.backends import Axis
from gsanet.functional.fused.gradients import differentiate_first
from gsanet.functional.native import calls


@torch.library.custom_op("gsanet::native_positional_attention", mutates_args=(), device_types="cpu")
def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: str) -> Tensor:
    """Positional attention; `rel` holds exactly the offsets of the line, (2 * length - 1, k)."""
    q, v = calls.side_by_side(q), calls.side_by_side(v)
    return calls.attend(q, v, rel, to_axis(axis), _like_map(v))


@positional_attention.register_fake
def _(q: Tensor, v: Tensor, rel: Tensor, axis: str) -> Tensor:
    return _like_map(v)


@torch.library.custom_op("gsanet::native_positional_attention_gradient", mutates_args=(), device_types="cpu")
def positional_attention_gradient(
    q: Tensor, v: Tensor, rel: Tensor, d_out: Tensor, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, v and rel."""
    d_q, d_v = _like_map(q), _like_map(v)
    q, v, d_out = (calls.side_by_side(tensor) for tensor in (q, v, d_out))
    return d_q, d_v, calls.attend_gradient(q, v, rel, to_axis(axis), d_out, d_q, d_v).d_rel


@positional_attention_gradient.register_fake
def _(q: Tensor, v: Tensor, rel: Tensor, d_out: Tensor, axis: str) -> tuple[Tensor, Tensor, Tensor]:
    return _like_map(q), _like_map(v), rel.new_empty(rel.shape)


def _save_positional(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
    *tensors, ctx.axis = inputs
    ctx.save_for_backward(*tensors)


def _positional_gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return *gradient_by_torch(_positional_by_torch, ctx, ctx.saved_tensors, d_out, ctx.axis), None
    return *positional_attention_gradient(*ctx.saved_tensors, d_out, ctx.axis), None


def _positional_by_torch(q: Tensor, v: Tensor, rel: Tensor, axis: str) -> Tensor:
    return lean.positional_attention(q, v, rel, to_axis(axis), None)


positional_attention.register_autograd(_positional_gradient, setup_context=_save_positional)


@torch.library.custom_op("gsanet::native_content_attention", mutates_args=(), device_types="cpu")
def content_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Content attention: the output, and what its gradient needs of the context vectors and of the softmax."""
    q, k, v = (calls.rows_in_order(tensor) for tensor in (q, k, v))
    vectors = calls.context_vectors(k, v)
    return calls.attend(q, v, None, "row", _like_map(v), context=vectors.context), *vectors


@content_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like_map(v), *calls.empty_context(k, v)


@torch.library.custom_op("gsanet::native_content_attention_gradient", mutates_args=(), device_types="cpu")
def content_attention_gradient(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, context: Tensor, softmax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    gradients = _like_map(q), _like_map(k), _like_map(v)
    q, k, v, d_out = (calls.rows_in_order(tensor) for tensor in (q, k, v, d_out))
    calls.content_gradient(q, k, v, d_out, calls.ContextVectors(context, softmax), *gradients)
    return gradients


@content_attention_gradient.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like_map(q), _like_map(k), _like_map(v)


def _save_content(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    differentiate_first(ctx, output)


def _content_gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, *vectors = ctx.saved_tensors
    if torch.is_grad_enabled():
        return tuple(gradient_by_torch(lean.content_attention, ctx, (q, k, v), d_out))
    return content_attention_gradient(q, k, v, d_out, *vectors)


content_attention.register_autograd(_content_gradient, setup_context=_save_content)


def gradient_by_torch(
    function: Callable[..., Tensor], ctx: Any, tensors: Sequence[Tensor | None], d_out: Tensor, *settings: Any
) -> list[Tensor | None]:
    """The gradient of a function of tensors and settings, one that can be differentiated again.

    Args:
        function: What an operator computes, in PyTorch's operators.
        ctx: Of the operator's backward pass; its first inputs are the tensors.
        tensors: What the function is given.
        d_out: The gradient of its output.
        settings: The function's other arguments.
    """
    needed = [i for i, tensor in enumerate(tensors) if tensor is not None and ctx.needs_input_grad[i]]
    wanted = [tensors[i] for i in needed]
    found = torch.autograd.grad(function(*tensors, *settings), wanted, d_out, create_graph=True)  # type: ignore[arg-type]
    gradients: list[Tensor | None] = [None] * len(tensors)
    for i, gradient in zip(needed, found, strict=True):
        gradients[i] = gradient
    return gradients


def to_axis(axis: str) -> Axis:
    """What an operator's schema has as any word."""
    return "column" if axis == "column" else "row"


def _like_map(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
