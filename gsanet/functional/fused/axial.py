"""Softmax attention along one axis as an operator with its gradient: axial attention on an NVIDIA GPU."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gsanet.functional.autocast import autocast_dtype, cast
from gsanet.functional.axial import attend_by_products
from gsanet.functional.exporting import is_exporting
from gsanet.functional.fused import available
from gsanet.functional.fused.calls import axial as calls
from gsanet.functional.fused.calls.tensors import like_map
from gsanet.functional.fused.gradients import save_inputs, second_gradient
from gsanet.functional.fused.plan.axial import fits_axial
from gsanet.functional.transforms import have_tangents

wanted = True  # whether what `takes` takes goes to the kernels; read when a network is compiled


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of the arguments of a product on a GPU."""
    dtype = autocast_dtype(tensors[0]) if tensors[0].is_cuda else None
    return tensors if dtype is None else cast(dtype, *tensors)


def takes(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> bool:
    """Whether the kernels take maps (batch, x, y, head, channel) and a table of the offsets along x, all of one dtype.

    What they do not take, mistakes too, is for PyTorch's own operators: those of other devices and dtypes, long lines
    with wide heads, the transforms of `torch.func`, forward-mode derivatives, exports.
    """
    if not wanted or is_exporting() or not available.take(q):
        return False
    tensors = (q, k, v, table)
    alike = all(one.dtype == q.dtype and one.device == q.device for one in tensors)
    fitting = q.dim() == 5 and q.shape == k.shape and q.shape[:4] == v.shape[:4] and v.dim() == 5
    if not alike or not fitting or table.shape != (2 * q.shape[1] - 1, q.shape[4]):
        return False
    return fits_axial(q.shape[1], q.shape[4], v.shape[4]) and v.shape[4] > 0 and not have_tangents(tensors)


@torch.library.custom_op("gsanet::axial_attention", mutates_args=())
def axial_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attend along dimension 1, for what `takes` takes; the output lies in memory in the order of v."""
    out = like_map(v, v.shape[3:])
    if v.numel():
        calls.axial_attention(q, k, v, table, out)
    return out


@axial_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return like_map(v, v.shape[3:])


@torch.library.custom_op("gsanet::axial_attention_gradient", mutates_args=())
def axial_attention_gradient(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the table."""
    d_q, d_k, d_v = (like_map(one, one.shape[3:]) for one in (q, k, v))
    if not v.numel():
        return d_q, d_k, d_v, table.new_zeros(table.shape)
    return d_q, d_k, d_v, calls.axial_attention_gradient(d_out, q, k, v, table, d_q, d_k, d_v)


@axial_attention_gradient.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return like_map(q, q.shape[3:]), like_map(k, k.shape[3:]), like_map(v, v.shape[3:]), table.new_empty(table.shape)


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
    return axial_attention_gradient(d_out, *ctx.saved_tensors)


axial_attention.register_autograd(_gradient, setup_context=save_inputs)
axial_attention_gradient.register_autograd(second_gradient(attend_by_products), setup_context=save_inputs)


@register_flop_formula(torch.ops.gsanet.axial_attention)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """By content and by position a product with each key, and one with each value."""
    return 2 * math.prod(q_shape[:4]) * q_shape[1] * (2 * q_shape[4] + v_shape[4])


@register_flop_formula(torch.ops.gsanet.axial_attention_gradient)
def _gradient_flops(d_out_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _flops(q_shape, k_shape, v_shape)
