"""Position-sensitive attention as an operator with its gradient: Axial-DeepLab's attention on an NVIDIA GPU."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gsanet.functional.exporting import is_exporting
from gsanet.functional.fused import available
from gsanet.functional.fused.calls import position_sensitive as calls
from gsanet.functional.fused.calls.tensors import like_map
from gsanet.functional.fused.gradients import save_inputs, second_gradient
from gsanet.functional.fused.plan.position_sensitive import fits_position_sensitive
from gsanet.functional.position_sensitive import attend_by_products, sum_scores
from gsanet.functional.transforms import have_tangents

wanted = True  # whether what `takes` takes goes to the kernels; read when a network is compiled


def takes(projected: Tensor, table: Tensor) -> bool:
    """Whether the kernels take a map (batch, x, y, head, channel) and tables of the offsets along x, (offset, channel).

    What they do not take, mistakes too, is for PyTorch's own operators: those of other devices and dtypes, long lines
    with wide heads, the transforms of `torch.func`, forward-mode derivatives, exports.
    """
    if not wanted or is_exporting() or not available.take(projected) or projected.dim() != 5:
        return False
    length, channels = projected.shape[1], projected.shape[4]
    fitting = channels % 4 == 0 and table.shape == (2 * length - 1, channels) and table.device == projected.device
    return fitting and fits_position_sensitive(length, channels // 4) and not have_tangents((projected, table))


@torch.library.custom_op("gsanet::position_sensitive_attention", mutates_args=())
def position_sensitive_attention(projected: Tensor, tables: Tensor, content: Tensor) -> Tensor:
    """As `attend_by_products`, for what `takes` takes; pixels of the output lie in memory in the order of the map's."""
    out = like_map(projected, _results_of(projected))
    if out.numel():
        calls.position_sensitive_attention(projected, tables, content, out)
    return out


@position_sensitive_attention.register_fake
def _(projected: Tensor, tables: Tensor, content: Tensor) -> Tensor:
    return like_map(projected, _results_of(projected))


@torch.library.custom_op("gsanet::position_sensitive_gradient", mutates_args=())
def position_sensitive_gradient(
    d_out: Tensor, projected: Tensor, tables: Tensor, content: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the map, the tables and the factors."""
    d_projected = like_map(projected, projected.shape[3:])
    if not projected.numel():
        return d_projected, tables.new_zeros(tables.shape), content.new_zeros(content.shape)
    return d_projected, *calls.position_sensitive_gradient(d_out, projected, tables, content, d_projected)


@position_sensitive_gradient.register_fake
def _(d_out: Tensor, projected: Tensor, tables: Tensor, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_projected = like_map(projected, projected.shape[3:])
    return d_projected, tables.new_empty(tables.shape), content.new_empty(content.shape)


def _results_of(projected: Tensor) -> tuple[int, int, int]:
    """By content and by position, for each head, as many channels as values have."""
    return 2, projected.shape[3], projected.shape[4] // 2


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
    return position_sensitive_gradient(d_out, *ctx.saved_tensors)


position_sensitive_attention.register_autograd(_gradient, setup_context=save_inputs)
position_sensitive_gradient.register_autograd(second_gradient(attend_by_products), setup_context=save_inputs)


@torch.library.custom_op("gsanet::position_sensitive_sums", mutates_args=())
def position_sensitive_sums(projected: Tensor, table: Tensor) -> Tensor:
    """As `sum_scores`, for what `takes` takes, of one dtype."""
    if not projected.numel():
        return projected.new_zeros(2, 3, projected.shape[3], dtype=torch.float32)
    return calls.position_sensitive_sums(projected, table)


@position_sensitive_sums.register_fake
def _(projected: Tensor, table: Tensor) -> Tensor:
    return projected.new_empty(2, 3, projected.shape[3], dtype=torch.float32)


@torch.library.custom_op("gsanet::position_sensitive_sums_gradient", mutates_args=())
def position_sensitive_sums_gradient(d_sums: Tensor, projected: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of q | k of the map and of the table: v has none."""
    d_projected, d_table = _gradients_of_sums(projected, table)
    if not projected.numel():
        return d_projected, d_table.zero_()
    return d_projected, calls.position_sensitive_sums_gradient(d_sums, projected, table, d_projected, d_table)


@position_sensitive_sums_gradient.register_fake
def _(d_sums: Tensor, projected: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients_of_sums(projected, table)


def _gradients_of_sums(projected: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    width = table.shape[1] // 2
    return like_map(projected, (projected.shape[3], width)), table.new_empty(table.shape[0], width)


def _gradient_of_sums(ctx: Any, d_sums: Tensor) -> tuple[Tensor, ...]:
    found = position_sensitive_sums_gradient(d_sums, *ctx.saved_tensors)
    return tuple(F.pad(one, (0, one.shape[-1])) for one in found)


def _of_queries_and_keys(gradient: Tensor) -> Tensor:
    return gradient[..., : gradient.shape[-1] // 2]


position_sensitive_sums.register_autograd(_gradient_of_sums, setup_context=save_inputs)
position_sensitive_sums_gradient.register_autograd(
    second_gradient(sum_scores, _of_queries_and_keys), setup_context=save_inputs
)


@register_flop_formula(torch.ops.gsanet.position_sensitive_sums)
def _flops_of_sums(shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(shape[:4]) * shape[1] * 3 * shape[4] // 4


@register_flop_formula(torch.ops.gsanet.position_sensitive_sums_gradient)
def _gradient_flops_of_sums(d_sums_shape: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _flops_of_sums(shape)


@register_flop_formula(torch.ops.gsanet.position_sensitive_attention)
def _flops(shape: Any, *args: Any, **kwargs: Any) -> int:
    """Three products of a score, half as wide as the two with each value."""
    return 2 * math.prod(shape[:4]) * shape[1] * (3 * shape[4] // 4 + shape[4])


@register_flop_formula(torch.ops.gsanet.position_sensitive_gradient)
def _gradient_flops(d_out_shape: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _flops(shape)
