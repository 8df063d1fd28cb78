"""The two layers as operators of PyTorch, with autograd, and fake implementations for torch.compile and export."""

from typing import Any

import torch
from torch import Tensor

from gsanet.functional.backends import Axis
from gsanet.functional.fused import calls
from gsanet.functional.fused.gradients import differentiate_first


@torch.library.custom_op("gsanet::positional_attention", mutates_args=())
def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: str) -> Tensor:
    """Positional attention; `rel` holds exactly the offsets of the line, (2 * length - 1, k)."""
    if v.numel() == 0:
        return _like_map(v)
    return calls.attend(calls.side_by_side(q), calls.side_by_side(v), rel.contiguous(), _axis(axis)).out


@positional_attention.register_fake
def _(q: Tensor, v: Tensor, rel: Tensor, axis: str) -> Tensor:
    return _like_map(v)


@torch.library.custom_op("gsanet::positional_attention_gradient", mutates_args=())
def positional_attention_gradient(
    q: Tensor, v: Tensor, rel: Tensor, d_out: Tensor, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, v and rel."""
    d_q, d_v = _like_map(q), _like_map(v)
    if v.numel() == 0:
        return d_q, d_v, torch.zeros_like(rel)
    q, v, d_out = (calls.side_by_side(tensor) for tensor in (q, v, d_out))
    gradient = calls.attend_gradient(q, v, rel.contiguous(), d_out, _axis(axis), d_q, d_v)
    return d_q, d_v, gradient.d_rel


@positional_attention_gradient.register_fake
def _(q: Tensor, v: Tensor, rel: Tensor, d_out: Tensor, axis: str) -> tuple[Tensor, Tensor, Tensor]:
    return _like_map(q), _like_map(v), torch.empty_like(rel, memory_format=torch.contiguous_format)


def _save_positional(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
    *tensors, ctx.axis = inputs
    ctx.save_for_backward(*tensors)


def _positional_gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    q, v, rel = ctx.saved_tensors
    return *positional_attention_gradient(q, v, rel, d_out, ctx.axis), None


positional_attention.register_autograd(_positional_gradient, setup_context=_save_positional)


@torch.library.custom_op("gsanet::content_attention", mutates_args=())
def content_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Content attention: the output, and what its gradient needs of the context vectors and of the softmax."""
    if v.numel() == 0:
        return _like_map(v), *calls.empty_context(q, v)
    k, v = (_rows_in_order(calls.side_by_side(tensor)) for tensor in (k, v))
    vectors = calls.context_vectors(k, v)
    out = _like_map(v)
    torch.matmul(_by_head(q), calls.unpacked(vectors.context, q.shape[4], v.shape[4]), out=_by_head(out))
    return out, *vectors


@content_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _like_map(v), *calls.empty_context(q, v)


@torch.library.custom_op("gsanet::content_attention_gradient", mutates_args=())
def content_attention_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    context: Tensor,
    turned: Tensor,
    key_max: Tensor,
    key_inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    d_q, d_k, d_v = _like_map(q), _like_map(k), _like_map(v)
    if v.numel() == 0:
        return d_q, d_k, d_v
    key, value = q.shape[4], v.shape[4]
    q, d_out = (_rows_in_order(calls.side_by_side(tensor)) for tensor in (q, d_out))
    vectors = calls.ContextVectors(context, turned, key_max, key_inverse)
    packed, _, offset = calls.context_gradient(q, d_out, vectors)
    gradient = calls.unpacked(packed, key, value)
    torch.matmul(_by_head(d_out), calls.unpacked(context, key, value).mT, out=_by_head(d_q))
    weights = (k.flatten(1, 2) - key_max[:, None]).exp_().to(k.dtype)  # b, xy, n, k
    weights_by_head = weights.transpose(1, 2)
    torch.matmul(weights_by_head, gradient, out=_by_head(d_v))
    slope = torch.matmul(_by_head(v), gradient.mT)  # b, n, xy, k
    _by_head(d_k).copy_(weights_by_head * (slope - offset[:, :, None]))
    return d_q, d_k, d_v


@content_attention_gradient.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like_map(q), _like_map(k), _like_map(v)


def _save_content(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    differentiate_first(ctx, output)


def _content_gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    q, k, v, *vectors = ctx.saved_tensors
    return content_attention_gradient(q, k, v, d_out, *vectors)


content_attention.register_autograd(_content_gradient, setup_context=_save_content)


def _like_map(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _by_head(x: Tensor) -> Tensor:
    """(batch, x, y, head, channel) as (batch, head, pixel, channel), a view of a map whose rows follow each other."""
    return x.flatten(1, 2).transpose(1, 2)


def _rows_in_order(x: Tensor) -> Tensor:
    """The map itself if its pixels are equally spaced in order, else a copy."""
    return x if x.stride(1) == x.shape[2] * x.stride(2) else x.contiguous()


def _axis(axis: str) -> Axis:
    return "column" if axis == "column" else "row"
