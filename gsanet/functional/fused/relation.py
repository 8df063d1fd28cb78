"""Local relation as an operator with its gradient: LR-Net on an NVIDIA GPU."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gsanet.functional.exporting import is_exporting
from gsanet.functional.fused import available
from gsanet.functional.fused.calls import relation as calls
from gsanet.functional.fused.plan.relation import LARGEST, WIDEST
from gsanet.functional.relation import relate_by_products
from gsanet.functional.transforms import have_tangents

wanted = True  # whether what `takes` takes goes to the kernels; read when a network is compiled
MOST = 2**30  # pixels and heads of a batch, which are counted in 32 bits


def takes(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int) -> bool:
    """Whether the kernels take what `relate_by_products` does.

    What they do not take, mistakes too, is for PyTorch's own operators: those of other devices and dtypes, large
    windows, wide heads, the transforms of `torch.func`, forward-mode derivatives, exports.
    """
    if not wanted or is_exporting() or not available.take(v):
        return False
    numbers = (q, k, prior)
    if any(one.dtype != torch.float32 or one.device != v.device for one in numbers) or v.dim() != 5:
        return False
    batch, height, width, heads, channels = v.shape
    rows, columns = (-(-length // stride) for length in (height, width))
    fitting = (
        q.shape == (batch, rows, columns, heads)
        and k.shape == (batch, height, width, heads)
        and prior.shape == (heads, window**2)
    )
    small = window % 2 == 1 and window <= LARGEST and 1 <= channels <= WIDEST and k.numel() < MOST
    return fitting and small and not have_tangents((*numbers, v))


@torch.library.custom_op("gsanet::local_relation", mutates_args=())
def local_relation(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """As `relate_by_products`, for what `takes` takes."""
    out = v.new_empty(*q.shape, v.shape[4])
    if out.numel():
        q, k, prior, v = (one.contiguous() for one in (q, k, prior, v))
        calls.local_relation(q, k, prior, v, out, window, stride)
    return out


@local_relation.register_fake
def _(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    return v.new_empty(*q.shape, v.shape[4])


@torch.library.custom_op("gsanet::local_relation_gradient", mutates_args=())
def local_relation_gradient(
    d_out: Tensor, q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, prior and v, dense."""
    d_out, q, k, prior, v = (one.contiguous() for one in (d_out, q, k, prior, v))
    if not d_out.numel():
        d_q, d_k, d_prior, d_v = (torch.zeros_like(one) for one in (q, k, prior, v))
        return d_q, d_k, d_prior, d_v
    return calls.local_relation_gradient(d_out, q, k, prior, v, window, stride)


@local_relation_gradient.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_prior, d_v = (one.new_empty(one.shape) for one in (q, k, prior, v))
    return d_q, d_k, d_prior, d_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.window, ctx.stride = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return *local_relation_gradient(d_out, *ctx.saved_tensors, ctx.window, ctx.stride), None, None


def _second_gradient(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """That of the gradient, by PyTorch's own operators."""
    with torch.enable_grad():
        d_out, q, k, prior, v = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        out = relate_by_products(q, k, prior, v, ctx.window, ctx.stride)
        first = torch.autograd.grad(out, (q, k, prior, v), d_out, create_graph=True)
    return *torch.autograd.grad(first, (d_out, q, k, prior, v), gradients), None, None


local_relation.register_autograd(_gradient, setup_context=_save)
local_relation_gradient.register_autograd(_second_gradient, setup_context=_save)


@register_flop_formula(torch.ops.gsanet.local_relation)
def _flops(q_shape: Any, k_shape: Any, prior_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """As its products are counted: each neighbour's score is two of them, and each of its channels one."""
    return 2 * math.prod(q_shape) * prior_shape[1] * (2 + v_shape[4])


@register_flop_formula(torch.ops.gsanet.local_relation_gradient)
def _gradient_flops(d_out_shape: Any, *shapes: Any, **kwargs: Any) -> int:
    return 2 * _flops(*shapes[:4])
