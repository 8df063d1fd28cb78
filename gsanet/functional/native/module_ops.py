"""The whole module as operators of PyTorch on a CPU, with fake implementations for torch.compile.

`gsanet::native_attention_map` is the module with a batch norm between its axes, whose statistics may be the batch's,
and has a gradient. `gsanet::native_attention_map_inference` is `module.attention_map` for torch.compile.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsanet.functional import lean
from gsanet.functional.attention import split_heads, to_feature_map
from gsanet.functional.fused.gradients import differentiate_first
from gsanet.functional.fused.norms import applied_with
from gsanet.functional.native import calls, module
from gsanet.functional.native.layer_ops import gradient_by_torch
from gsanet.functional.projection import is_for_convolution, project

Maps = tuple[Tensor, Tensor | None, Tensor]  # of queries, keys and values


def _split(projected: Tensor, x: Tensor, heads: int, dim_key: int, content: bool) -> Maps:
    """Views of (pixels, q | k | v) as maps (batch, x, y, head, channel) of the size of the map x."""
    batch, _, height, width = x.shape
    return split_heads(projected.view(batch, height, width, -1), heads, dim_key, content)


def _project_gradient(d_projected: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the map, channels-last, and of the weight; that of the projection is (pixels, q | k | v)."""
    pixels = x.permute(0, 2, 3, 1)
    if not is_for_convolution(x):
        d_x = (d_projected @ weight).view(pixels.shape).permute(0, 3, 1, 2)
        return d_x, d_projected.t() @ pixels.flatten(0, 2)
    x = x.contiguous(memory_format=torch.channels_last)
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        d_projected.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2), x, weight[:, :, None, None], None,
        [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False],
    )  # fmt: skip
    return d_x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), d_weight.flatten(1).contiguous()


@torch.library.custom_op("gsanet::native_attention_map", mutates_args=(), device_types="cpu")
def attention_map(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    applied: Tensor | None,
    heads: int,
    dim_key: int,
    content: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole module, without pooling.

    Args:
        x: (batch, channels, height, width).
        weight: The projections of q, k (with content attention) and v, stacked.
        rel_column: Embeddings of exactly the offsets of a column.
        rel_row: The same of a row.
        norm_weight: Of the batch norm between the axes, or None.
        norm_bias: The same.
        applied: Its scale, shift, mean, 1 / standard deviation and variance, (5, channels), if these are known; None to
            take them from this batch.
        heads: Number of heads.
        dim_key: Channels of q.
        content: Whether content attention is on.
        epsilon: Of the batch norm.

    Returns:
        The output; q, k and v as (pixels, q | k | v), as torch.compile takes four dimensions for a map that it wants
        channels-last; the output of the column layer; `applied`; and the two tensors of the context vectors.
    """
    projected = project(x, weight).flatten(0, 2)
    q, k, v = _split(projected, x, heads, dim_key, content)
    column, out = v.new_empty(v.shape), v.new_empty(v.shape)
    moments = calls.empty_moments(v, "column") if applied is None else None
    calls.attend(q, v, rel_column, "column", column, moments=moments)
    if moments is None:
        assert applied is not None
        applied = applied.clone()  # an operator's results are never its arguments
    else:
        applied = applied_with(*calls.join_moments(moments), norm_weight, norm_bias, epsilon)
    vectors = calls.empty_context(q[:0], v[:0]) if k is None else calls.context_vectors(k, v)
    context = None if k is None else vectors.context
    calls.attend(q, column, rel_row, "row", out, context=context, norm=applied)
    return to_feature_map(out), projected, column, applied, *vectors


@attention_map.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    heads, dim_key, content, _ = others[-4:]
    batch, _, height, width = x.shape
    projected = x.new_empty(batch * height * width, weight.shape[0])
    q, _, v = _split(projected, x, heads, dim_key, content)
    column = v.new_empty(v.shape)
    vectors = calls.empty_context(q, v) if content else calls.empty_context(q[:0], v[:0])
    return (
        to_feature_map(column.new_empty(v.shape)),
        projected,
        column,
        x.new_empty(5, column.shape[3] * column.shape[4], dtype=torch.float32),
        *vectors,
    )


@torch.library.custom_op("gsanet::native_attention_map_gradient", mutates_args=(), device_types="cpu")
def attention_map_gradient(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    projected: Tensor,
    column: Tensor,
    applied: Tensor,
    context: Tensor,
    softmax: Tensor,
    heads: int,
    dim_key: int,
    content: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, rel_column, rel_row, and (2, channels) those of the batch norm's weight and bias.

    `fixed`: the batch norm's statistics were given.
    """
    q, k, v = _split(projected, x, heads, dim_key, content)
    d_projected = torch.empty_like(projected)
    d_q, d_k, d_v = _split(d_projected, x, heads, dim_key, content)
    d_out = calls.rows_in_order(d_out.permute(0, 2, 3, 1).unflatten(-1, (heads, -1)))
    d_normalised = torch.empty_like(column)
    row = calls.attend_gradient(q, column, rel_row, "row", d_out, d_q, d_normalised, norm=applied)
    coefficients = _coefficients(applied, row.sums, len(projected), fixed)
    columns = calls.attend_gradient(
        q, v, rel_column, "column", d_normalised, d_q, d_v, add=True, out=column, coefficients=coefficients
    )
    if k is not None and d_k is not None:
        calls.content_gradient(q, k, v, d_out, calls.ContextVectors(context, softmax), d_q, d_k, d_v, add=True)
    return *_project_gradient(d_projected, x, weight), columns.d_rel, row.d_rel, row.sums.flip(0)


@attention_map_gradient.register_fake
def _(
    d_out: Tensor, x: Tensor, weight: Tensor, rel_column: Tensor, rel_row: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    applied = others[2]
    batch, channels, height, width = x.shape
    d_x = x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    tables = (table.new_empty(table.shape) for table in (weight, rel_column, rel_row))
    return d_x, *tables, applied.new_empty(2, applied.shape[1])


def _coefficients(applied: Tensor, sums: Tensor, count: int, fixed: bool) -> Tensor:
    """From the sums over a norm's gradient to what `attend_gradient` makes of it, (4, channels)."""
    scale, _, mean, inverse, _ = applied
    level, slope = sums
    if fixed:
        return torch.stack((scale, torch.zeros_like(scale), mean, torch.zeros_like(scale)))
    return torch.stack((scale, scale * inverse * slope / -count, mean, scale * level / -count))


def _save_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, rel_column, rel_row, norm_weight, norm_bias, applied, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, rel_column, rel_row, norm_weight, norm_bias, *output[1:])
    ctx.fixed = applied is not None
    differentiate_first(ctx, output)


def _map_gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *given, norm_weight, norm_bias, projected, column, applied, context, softmax = ctx.saved_tensors
    if torch.is_grad_enabled():
        tensors = (*given, norm_weight, norm_bias)
        return *gradient_by_torch(_map_by_torch, ctx, tensors, d_out, applied, ctx.fixed, *ctx.settings), *(None,) * 5
    *settings, _epsilon = ctx.settings
    kept = (projected, column, applied, context, softmax)
    *gradients, d_norm = attention_map_gradient(d_out, *given, *kept, *settings, ctx.fixed)
    d_norms = (None if one is None else d for one, d in zip((norm_weight, norm_bias), d_norm, strict=True))
    return *gradients, *d_norms, *(None,) * 5


def _map_by_torch(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    applied: Tensor,
    fixed: bool,
    heads: int,
    dim_key: int,
    content: bool,
    epsilon: float,
) -> Tensor:
    """What the operator computes, in PyTorch's operators."""
    q, k, v = split_heads(project(x, weight), heads, dim_key, content)
    column = to_feature_map(lean.positional_attention(q, v, rel_column, "column", None))
    mean, variance = (applied[2], applied[4]) if fixed else (None, None)
    column = F.batch_norm(column, mean, variance, norm_weight, norm_bias, training=not fixed, eps=epsilon)
    values = column.permute(0, 2, 3, 1).unflatten(-1, (heads, -1))
    out = lean.positional_attention(q, values, rel_row, "row", None)
    return to_feature_map(out if k is None else out + lean.content_attention(q, k, v))


attention_map.register_autograd(_map_gradient, setup_context=_save_map)


@torch.library.custom_op("gsanet::native_attention_map_inference", mutates_args=(), device_types="cpu")
def attention_map_inference(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Tensor | None,
    finish: Tensor | None,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
) -> Tensor:
    """As `gsanet.functional.global_self_attention_map`, without gradients; norms are their scale and shift."""
    return module.attention_map(
        x, weight, rel_column, rel_row, norm,
        finish=finish, num_heads=heads, dim_key=dim_key, content=content, reach=None, stride=stride,
    )  # fmt: skip


@attention_map_inference.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    _, dim_key, content, stride = others[-4:]
    batch, _, height, width = x.shape
    dim_out = weight.shape[0] - dim_key * (2 if content else 1)
    return x.new_empty(batch, -(-height // stride), -(-width // stride), dim_out).permute(0, 3, 1, 2)
