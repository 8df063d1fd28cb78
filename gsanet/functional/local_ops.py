"""The operators behind `gsanet.functional.local`: loops over the offsets of a window, and kernels on an NVIDIA GPU.

Each one's gradients are the other two. Beside inputs and output, only products of the size of one map exist, where
unfolding would hold n * n copies of it. As custom ops they are seen whole by `torch.compile` and by torch's flop
counter, which is told what the equation costs: 2 n^2 operations for each pixel and channel, also where the window hangs
over the border.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gsanet.functional.fused import local as fused

Span = tuple[slice, slice]


def _spans(inner: int, outer: int, window: int, stride: int, padding: int) -> list[Span | None]:
    """For each offset along one axis: the output pixels that have this neighbour, and the neighbours."""
    spans: list[Span | None] = []
    for i in range(window):
        shift = i - padding
        first = max(0, -(shift // stride))  # the first x' with stride * x' + shift >= 0
        last = min(inner - 1, (outer - 1 - shift) // stride)
        start, end = stride * first + shift, stride * last + shift + 1
        spans.append((slice(first, last + 1), slice(start, end, stride)) if first <= last else None)
    return spans


def _offsets(inner: Tensor, outer: Tensor, window: int, stride: int, padding: int) -> Iterator[tuple[int, Any, Any]]:
    """Each offset that meets the map: its number, and what indexes the output pixels and their neighbours."""
    rows, columns = (_spans(inner.shape[d], outer.shape[d], window, stride, padding) for d in (1, 2))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if row is not None and column is not None:
                yield i * window + j, (slice(None), row[0], column[0]), (slice(None), row[1], column[1])


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


@torch.library.custom_op("gsanet::local_scores", mutates_args=())
def local_scores(q: Tensor, k: Tensor, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    """The product of each q with its neighbours' k: (batch, x', y', head, offset)."""
    if fused.takes(window, q, k, k.shape[4]):
        return fused.local_scores(q, k, window, stride, padding)
    scores = q.new_zeros(*q.shape[:4], window * window)
    for o, here, there in _offsets(q, k, window, stride, padding):
        scores[here][..., o] = (q[here] * k[there]).sum(-1)
    return scores


@torch.library.custom_op("gsanet::local_mix", mutates_args=())
def local_mix(weights: Tensor, v: Tensor, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    """The sum of the neighbours' v with (batch, x', y', head, offset) weights: (batch, x', y', head, channel)."""
    if fused.takes(window, weights, v, window**2):
        return fused.local_mix(weights, v, window, stride, padding)
    out = v.new_zeros(*weights.shape[:4], v.shape[4], dtype=_sum_dtype(v))
    for o, here, there in _offsets(weights, v, window, stride, padding):
        out[here] += weights[here][..., o : o + 1] * v[there]
    return out.to(v.dtype)


@torch.library.custom_op("gsanet::local_spread", mutates_args=())
def local_spread(
    weights: Tensor, q: Tensor, height: int, width: int, window: int, stride: int = 1, padding: int = 0
) -> Tensor:
    """Each q given to its neighbours on a map of height x width: the transpose of `local_mix`."""
    if weights.shape[:4] == q.shape[:4] and fused.takes(window, weights, q, window**2):
        return fused.local_spread(weights, q, height, width, window, stride, padding)
    out = q.new_zeros(q.shape[0], height, width, *q.shape[3:], dtype=_sum_dtype(q))
    for o, here, there in _offsets(weights, out, window, stride, padding):
        out[there] += weights[here][..., o : o + 1] * q[here]
    return out.to(q.dtype)


@local_scores.register_fake
def _(q: Tensor, k: Tensor, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    return q.new_empty(*q.shape[:4], window * window)


@local_mix.register_fake
def _(weights: Tensor, v: Tensor, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    return v.new_empty(*weights.shape[:4], v.shape[4])


@local_spread.register_fake
def _(weights: Tensor, q: Tensor, height: int, width: int, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    return q.new_empty(q.shape[0], height, width, *q.shape[3:])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[-3:]


def _scores_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k = ctx.saved_tensors
    dq = local_mix(grad, k, *ctx.options) if ctx.needs_input_grad[0] else None
    dk = local_spread(grad, q, k.shape[1], k.shape[2], *ctx.options) if ctx.needs_input_grad[1] else None
    return dq, dk, None, None, None


def _mix_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, v = ctx.saved_tensors
    dw = local_scores(grad, v, *ctx.options) if ctx.needs_input_grad[0] else None
    dv = local_spread(weights, grad, v.shape[1], v.shape[2], *ctx.options) if ctx.needs_input_grad[1] else None
    return dw, dv, None, None, None


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, q = ctx.saved_tensors
    dw = local_scores(q, grad, *ctx.options) if ctx.needs_input_grad[0] else None
    dq = local_mix(weights, grad, *ctx.options) if ctx.needs_input_grad[1] else None
    return dw, dq, None, None, None, None, None


local_scores.register_autograd(_scores_backward, setup_context=_remember)
local_mix.register_autograd(_mix_backward, setup_context=_remember)
local_spread.register_autograd(_spread_backward, setup_context=_remember)


def _cost(pixels_and_heads: Any, channels: int, window: int) -> int:
    return 2 * math.prod(pixels_and_heads) * channels * window**2


@register_flop_formula(torch.ops.gsanet.local_scores)
def _scores_flops(q_shape: Any, k_shape: Any, window: int, *args: Any, **kwargs: Any) -> int:
    return _cost(q_shape[:4], q_shape[4], window)


@register_flop_formula(torch.ops.gsanet.local_mix)
def _mix_flops(weights_shape: Any, v_shape: Any, window: int, *args: Any, **kwargs: Any) -> int:
    return _cost(weights_shape[:4], v_shape[4], window)


@register_flop_formula(torch.ops.gsanet.local_spread)
def _spread_flops(weights_shape: Any, q_shape: Any, height: int, width: int, window: int, *_: Any, **__: Any) -> int:
    return _cost(q_shape[:4], q_shape[4], window)
