"""The whole module as operators of PyTorch, with autograd, and fake implementations for torch.compile and export.

`gsanet::attention_map` goes from the feature map to the pooled output: the projection, both branches and the batch norm
between the axes. `gsanet::attention_map_inference` is the same with fixed norms, the one behind the module included,
and has no gradient. Modules with one axis are in `axis_ops.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gsanet.functional.attention import to_feature_map
from gsanet.functional.fused import calls
from gsanet.functional.fused.beside import start_beside
from gsanet.functional.fused.gradients import differentiate_first
from gsanet.functional.fused.prepared import prepared_operator
from gsanet.functional.fused.projection import (
    empty_results,
    project,
    project_few,
    project_gradient,
    project_heads,
    project_on_chip,
    recall,
    split,
)
from gsanet.functional.inference_only import refuse_gradients


def _attention_map(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    centre: Tensor,
    applied: Tensor | None,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The whole module.

    Args:
        x: (batch, channels, height, width).
        weight: The projections of q, k (with content attention) and v, stacked.
        rel_column: Embeddings of exactly the offsets of a column.
        rel_row: The same of a row.
        norm_weight: Of the batch norm between the axes, in float32, or None.
        norm_bias: The same.
        centre: Its running mean or any other guess of the mean, in float32.
        applied: Its scale, shift, mean, 1 / standard deviation and variance, (5, channels), if these are known; None to
            take them from this batch.
        heads: Number of heads.
        dim_key: Channels of q.
        content: Whether content attention is on.
        stride: 1, or 2: average 2 x 2 pixels.
        epsilon: Of the batch norm.

    Returns:
        The output, the output of the column layer, `applied`, the four tensors of the context vectors, and of q, k and
        v in one tensor (pixels, channels) what it is not better to project again (`channels_kept`). It has no four
        dimensions because torch.compile would copy it, taking it for a map that it wants channels-last, and back again
        before the backward pass.
    """
    q, v, vectors, projected = project_heads(x, weight, heads, dim_key, content)
    rel_column, rel_row = rel_column.contiguous(), rel_row.contiguous()
    column, statistics = calls.attend(q, v, rel_column, "column", centre=centre if applied is None else None)
    if statistics is not None:
        count = x.shape[0] * x.shape[2] * x.shape[3]
        applied = calls.norm_statistics(statistics, centre, norm_weight, norm_bias, count, epsilon)
    else:
        assert applied is not None
        applied = applied.clone()  # an operator's results are never its arguments
    turned = vectors.turned if content else None
    out = calls.attend(q, column, rel_row, "row", norm=applied, context=turned, pool=stride == 2).out
    return to_feature_map(out), column, applied, *vectors, projected


def _prepare(*arguments: Any) -> None:
    x, weight, *_, applied, heads, dim_key, content, stride, _ = arguments
    settings = (heads, dim_key, content, stride)
    _compile_ahead(_run_training, x.device, x.dtype, tuple(x.shape), weight.shape[0], settings, applied is None)


attention_map = prepared_operator("gsanet::attention_map", _attention_map, _prepare)


@attention_map.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    heads, dim_key, content, stride, _ = others[-5:]
    out, column, vectors, projected = empty_results(x, weight, heads, dim_key, content, stride)
    return out, column, x.new_empty(5, out.shape[1], dtype=torch.float32), *vectors, projected


def _attention_map_gradient(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    column: Tensor,
    applied: Tensor,
    context: Tensor,
    turned: Tensor,
    key_max: Tensor,
    key_inverse: Tensor,
    projected: Tensor,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, rel_column, rel_row, and (2, channels) those of the batch norm's weight and bias.

    `fixed`: the batch norm's statistics were given.
    """
    q, k, v = recall(projected, x, weight, heads, dim_key, content)
    batch, height, width = q.shape[:3]
    rel_column, rel_row = rel_column.contiguous(), rel_row.contiguous()
    d_projected = q.new_empty(batch * height * width, weight.shape[0])
    d_q, d_k, d_v = split(d_projected, x, heads, dim_key, content)
    d_out = d_out.permute(0, 2, 3, 1).contiguous()
    if d_out.data_ptr() % 16:
        d_out = d_out.clone()  # the sums of channels need whole accesses
    d_out = d_out.unflatten(-1, (heads, -1))
    d_normalised = torch.empty_like(column)
    pool = stride == 2
    row = calls.attend_gradient(
        q, column, rel_row, d_out, "row", d_q, d_normalised,
        norm=applied, moments=applied[2:4], context=context if content else None, pool=pool,
    )  # fmt: skip
    assert row.statistics is not None
    coefficients = calls.norm_gradient(row.statistics, applied, batch * height * width, fixed)
    content_gradient = None
    if k is not None and d_k is not None:
        vectors = calls.ContextVectors(context, turned, key_max, key_inverse)
        content_gradient = calls.content_gradient(q, k, d_k, d_out, vectors, pool)
    columns = calls.attend_gradient(
        q, v, rel_column, d_normalised, "column", d_q, d_v,
        accumulate=True, coefficients=coefficients, normalised=column, content=content_gradient,
    )  # fmt: skip
    return *project_gradient(d_projected, x, weight), columns.d_rel, row.d_rel, coefficients[3:5].clone()


attention_map_gradient = torch.library.custom_op(
    "gsanet::attention_map_gradient", _attention_map_gradient, mutates_args=()
)


@attention_map_gradient.register_fake
def _(
    d_out: Tensor, x: Tensor, weight: Tensor, rel_column: Tensor, rel_row: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    applied = others[1]
    batch, channels, height, width = x.shape
    d_x = x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    tables = (table.new_empty(table.shape) for table in (weight, rel_column, rel_row))
    return d_x, *tables, applied.new_empty(2, applied.shape[1])


Settings = tuple[int, int, bool, int]  # heads, channels of q, whether content attention is on, stride
Module = tuple[Tensor, Tensor, Tensor, Tensor]  # x, weight, rel_column, rel_row


@functools.cache
def _compile_ahead(
    run: Callable[[Module, Tensor, Settings, bool], None],
    device: torch.device,
    dtype: torch.dtype,
    size: tuple[int, int, int, int],
    rows: int,
    settings: Settings,
    more: bool,
) -> None:
    """Compile all kernels of a module at once when it is first met.

    Args:
        run: What launches them, called with a module and its norm, both without memory, `settings` and `more`.
        device: What they are compiled for.
        dtype: Of the module.
        size: Of the map.
        rows: Of the weight.
        settings: Of the module.
        more: The last argument of `run`.
    """
    if device.type == "cuda":
        tensors, norm = _module_on_meta(dtype, size, rows, *settings[:3])
        calls.compile_ahead(device, lambda: run(tensors, norm, settings, more))


def _run_training(module: Module, norm: Tensor, settings: Settings, training: bool) -> None:
    """The module and, where its statistics are the batch's, what its norm keeps of them, and its gradient."""
    forward: Any = _attention_map
    gradient: Any = _attention_map_gradient
    out, *kept = forward(*module, norm[0], norm[1], norm[2], None if training else norm, *settings, 0.0)
    if training:
        calls.keep_statistics(norm[2], norm[4], norm.new_empty((), dtype=torch.int64), norm, 1, 0.0)
        gradient(torch.empty_like(out), *module, *kept, *settings, False)


def _run_inference(module: Module, norm: Tensor, settings: Settings, finish: bool) -> None:
    """The module with fixed norms, one of them behind it if `finish`."""
    _attention_map_inference(*module, norm[:2], norm[:2] if finish else None, *settings)


def _module_on_meta(
    dtype: torch.dtype, size: tuple[int, int, int, int], rows: int, heads: int, dim_key: int, content: bool
) -> tuple[Module, Tensor]:
    """(x, weight, rel_column, rel_row) of a module, and (5, channels) of its norm, without memory."""
    x = torch.empty(size, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    column, row = (x.new_empty(2 * length - 1, dim_key // heads) for length in size[2:])
    norm = x.new_empty(5, rows - dim_key * (2 if content else 1), dtype=torch.float32)
    return (x, x.new_empty(rows, size[1]), column, row), norm


def _save_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, rel_column, rel_row, norm_weight, norm_bias, _, applied, *settings = inputs
    ctx.save_for_backward(x, weight, rel_column, rel_row, *output[1:])
    ctx.settings = settings[:-1]
    ctx.fixed = applied is not None
    ctx.has_norm = norm_weight is not None, norm_bias is not None
    differentiate_first(ctx, output)


def _map_gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_weight, d_column, d_row, d_norm = attention_map_gradient(d_out, *ctx.saved_tensors, *ctx.settings, ctx.fixed)
    d_norms = (gradient if has else None for gradient, has in zip(d_norm, ctx.has_norm, strict=True))
    return d_x, d_weight, d_column, d_row, *d_norms, *(None,) * 7


attention_map.register_autograd(_map_gradient, setup_context=_save_map)


def _attention_map_inference(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    norm: Tensor,
    finish: Tensor | None,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
) -> Tensor:
    """The whole module with fixed norms.

    Args:
        x: (batch, channels, height, width).
        weight: The projections of q, k (with content attention) and v, stacked.
        rel_column: Embeddings of exactly the offsets of a column.
        rel_row: The same of a row.
        norm: Scale and shift of the batch norm between the axes, (2, channels) in float32.
        finish: Scale and shift of the output, behind the pooling and before a ReLU, the same; or None for neither.
        heads: Number of heads.
        dim_key: Channels of q.
        content: Whether content attention is on.
        stride: 1, or 2: average 2 x 2 pixels.
    """
    tables = rel_column.contiguous(), rel_row.contiguous()  # here: between what follows is no kernel of others
    return infer(x, weight, tables, (norm, finish), (heads, dim_key, content, stride))


def infer(
    x: Tensor,
    weight: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor | None],
    settings: Settings,
    *,
    early: bool = False,
) -> Tensor:
    """As `gsanet::attention_map_inference`, of contiguous tables.

    `early`: all tensors but x are older than the kernel before, which is one of ours, so that the projection reads its
    weight at once.
    """
    (rel_column, rel_row), (norm, finish), (heads, dim_key, content, stride) = tables, norms, settings
    q, v, context, wait, early = _project_beside(x, weight, heads, dim_key, content, early)
    column = calls.attend(q, v, rel_column, "column", early_table=early).out
    wait()
    out = calls.attend(
        q, column, rel_row, "row", norm=norm, context=context, finish=finish, pool=stride == 2, early_table=True
    ).out
    return to_feature_map(out)


def _project_beside(
    x: Tensor, weight: Tensor, heads: int, dim_key: int, content: bool, early: bool
) -> tuple[Tensor, Tensor, Tensor | None, Callable[[], None], bool]:
    """Maps as large as x, q and v; the context vectors; what has the current stream wait for these; `early` behind."""
    on_chip = project_on_chip(x, weight, heads, dim_key, content)
    if on_chip is not None:
        return on_chip.q, on_chip.v, on_chip.vectors.turned, lambda: None, False
    projected = project_few(x, weight, early)
    early = projected is not None  # else cuBLAS is before the columns
    q, k, v = split(project(x, weight) if projected is None else projected, x, heads, dim_key, content)
    context, wait = start_beside(lambda: None if k is None else calls.context_vectors(k, v).turned, x)
    return q, v, context, wait, early


def _prepare_inference(*arguments: Any) -> None:
    x, weight, *_, finish, heads, dim_key, content, stride = arguments
    settings = (heads, dim_key, content, stride)
    _compile_ahead(_run_inference, x.device, x.dtype, tuple(x.shape), weight.shape[0], settings, finish is not None)


attention_map_inference = prepared_operator(
    "gsanet::attention_map_inference", _attention_map_inference, _prepare_inference
)


@attention_map_inference.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    _, dim_key, content, stride = others[-4:]
    batch, _, height, width = x.shape
    dim_out = weight.shape[0] - dim_key * (2 if content else 1)
    return x.new_empty(batch, height // stride, width // stride, dim_out).permute(0, 3, 1, 2)


refuse_gradients(attention_map_inference)
