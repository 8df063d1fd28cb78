"""The whole module with positional attention along one axis only, as one operator with its gradient.

Between the two axes of `gsanet::attention_map` is a batch norm, which sees all columns before the first row. With one
axis there is none, and one kernel of lines does what there are two for: it adds content attention to its output and
pools it, and backwards gives all gradients of q, k and v.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from gsanet.functional.attention import to_feature_map
from gsanet.functional.backends import Axis
from gsanet.functional.fused import calls
from gsanet.functional.fused.gradients import differentiate_first
from gsanet.functional.fused.prepared import prepared_operator
from gsanet.functional.fused.projection import (
    empty_results,
    project_gradient,
    project_heads,
    recall,
    split,
)


def _operator(name: str, function: Callable[..., tuple[Tensor, ...]]) -> CustomOpDef:
    """An operator that compiles all its kernels at once when a call of such shapes is first met."""
    return prepared_operator(name, function, lambda *arguments: _prepare(arguments[0].device, function, arguments))


def _prepare(device: torch.device, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if device.type == "cuda":
        likes = ((one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one for one in arguments)
        _compile_ahead(device, function, *likes)


@functools.cache
def _compile_ahead(device: torch.device, function: Callable[..., object], *likes: Any) -> None:
    arguments = tuple(
        torch.empty_strided(like[0], like[1], dtype=like[2], device="meta") if isinstance(like, tuple) else like
        for like in likes
    )
    calls.compile_ahead(device, lambda: function(*arguments))


def _attention_map(
    x: Tensor,
    weight: Tensor,
    rel: Tensor,
    finish: Tensor | None,
    axis: str,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole module.

    Args:
        x: (batch, channels, height, width).
        weight: The projections of q, k (with content attention) and v, stacked.
        rel: Embeddings of exactly the offsets of a line.
        finish: Scale and shift of the output, behind the pooling and before a ReLU, (2, channels) in float32, or None
            for neither. With it there is no gradient.
        axis: `"column"` or `"row"`.
        heads: Number of heads.
        dim_key: Channels of q.
        content: Whether content attention is on.
        stride: 1, or 2: average 2 x 2 pixels.

    Returns:
        The output, the four tensors of the context vectors, and what is kept of q, k and v (see `channels_kept`).
    """
    q, v, vectors, projected = project_heads(x, weight, heads, dim_key, content)
    context = vectors.turned if content else None
    out = calls.attend(q, v, rel.contiguous(), _axis(axis), context=context, finish=finish, pool=stride == 2).out
    return to_feature_map(out), *vectors, projected


attention_map = _operator("gsanet::attention_map_of_one_axis", _attention_map)


@attention_map.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    out, _, vectors, projected = empty_results(x, weight, *others[-4:])
    return out, *vectors, projected


def _attention_map_gradient(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    rel: Tensor,
    context: Tensor,
    turned: Tensor,
    key_max: Tensor,
    key_inverse: Tensor,
    projected: Tensor,
    axis: str,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and rel."""
    q, k, v = recall(projected, x, weight, heads, dim_key, content)
    d_projected = q.new_empty(q.shape[:3].numel(), weight.shape[0])
    d_q, d_k, d_v = split(d_projected, x, heads, dim_key, content)
    d_out = d_out.permute(0, 2, 3, 1).contiguous().unflatten(-1, (heads, -1))
    pool = stride == 2
    content_gradient = None
    if k is not None and d_k is not None:
        vectors = calls.ContextVectors(context, turned, key_max, key_inverse)
        content_gradient = calls.content_gradient(q, k, d_k, d_out, vectors, pool)
    d_rel = calls.attend_gradient(
        q, v, rel.contiguous(), d_out, _axis(axis), d_q, d_v,
        context=context if content else None, content=content_gradient, pool=pool,
    ).d_rel  # fmt: skip
    return *project_gradient(d_projected, x, weight), d_rel


attention_map_gradient = _operator("gsanet::attention_map_of_one_axis_gradient", _attention_map_gradient)


@attention_map_gradient.register_fake
def _(d_out: Tensor, x: Tensor, weight: Tensor, rel: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, channels, height, width = x.shape
    d_x = x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    return d_x, weight.new_empty(weight.shape), rel.new_empty(rel.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, rel, finish, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, rel, *output[1:])
    ctx.finished = finish is not None
    differentiate_first(ctx, output)


def _gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.finished:
        raise RuntimeError(
            f"{attention_map._qualname} with `finish` has no gradient: "
            "differentiate the network that fuse_for_inference was given"
        )
    return *attention_map_gradient(d_out, *ctx.saved_tensors, *ctx.settings), *(None,) * 6


attention_map.register_autograd(_gradient, setup_context=_save)


def _axis(axis: str) -> Axis:
    return "column" if axis == "column" else "row"
