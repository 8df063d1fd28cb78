"""The operators of `expansion.py`: sums over pixels of products of channels, the expansion itself, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from gsanet.functional.convolution import fused_convolution_relu
from gsanet.functional.fused import available, calls
from gsanet.functional.fused.calls.tensors import pixels, to_map

sums_wanted = True  # whether `sum_of_products` is one kernel where that is planned; read at each call


@torch.library.custom_op("gsanet::pixel_products", mutates_args=())
def pixel_products(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of two maps with the same pixels: y^T x, (channels of y, channels of x), and the sums of y, both in float32.

    Args:
        x: (batch, channels, height, width).
        y: The same; None for x itself.
    """
    rows = pixels(x)
    others = rows if y is None else pixels(y)
    sums = None
    if available.runs_on_device(rows):
        found = calls.pixel_products(rows, others)
        if found is not None:
            return found
        sums = calls.pixel_sums(others)
    if sums is None:
        sums = others.sum(0, dtype=torch.float32)
    if rows.is_cuda and rows.dtype != torch.float32:
        products = torch.mm(others.T, rows, out_dtype=torch.float32)
    else:
        products = others.float().T @ rows.float()
    return products, sums


@pixel_products.register_fake
def _(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    channels = (x if y is None else y).shape[1]
    return x.new_empty(channels, x.shape[1], dtype=torch.float32), x.new_empty(channels, dtype=torch.float32)


@torch.library.custom_op("gsanet::sum_of_products", mutates_args=())
def sum_of_products(first: Tensor, weight: Tensor, second: Tensor, square: Tensor, level: Tensor) -> Tensor:
    """The sum first weight + second square + level over the channels of two maps: a map, channels-last.

    Args:
        first: (batch, channels of one, height, width).
        weight: (channels of one, channels).
        second: (batch, channels, height, width).
        square: (channels, channels).
        level: (channels,).
    """
    rows, others = pixels(first), pixels(second)
    out = None
    if sums_wanted and available.runs_on_device(rows):
        out = calls.map_channels(rows, weight, others, square, level=level)
    if out is None:
        out = torch.addmm(level, others, square)
        out.addmm_(rows, weight)  # in place: else it would be copied first
    return to_map(out, second)


@sum_of_products.register_fake
def _(first: Tensor, weight: Tensor, second: Tensor, square: Tensor, level: Tensor) -> Tensor:
    return to_map(second.new_empty(second.numel() // second.shape[1], second.shape[1]), second)


@torch.library.custom_op("gsanet::expansion", mutates_args=())
def expansion(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    folded: Tensor,
    shift: Tensor,
    spread: Tensor,
    mean: Tensor,
    scale: Tensor,
    inverse: Tensor,
    relu: bool,
    masked: bool,
) -> Tensor:
    """relu(batch norm of x weight^T + residual), from what `expansion.Moments` holds; a map, channels-last.

    Args:
        x: (batch, channels in, height, width).
        weight: (channels, channels in), in float32; this and the norm's are here for their gradients.
        norm_weight: (channels,), in float32, or None.
        norm_bias: The same.
        residual: (batch, channels, height, width), or None for nothing.
        folded: The weight times the norm's scale, in the dtype of x.
        shift: The norm's, in the dtype of x.
        spread: The weight times the covariance of x, (channels, channels in), in float32.
        mean: Of x, (channels in,), the same.
        scale: The norm's, (channels,), the same.
        inverse: 1 / standard deviation, (channels,), the same.
        relu: Whether there is a ReLU.
        masked: Whether the output's gradient is zero already where the ReLU is closed.
    """
    rows = pixels(x)
    if relu and available.runs_on_device(rows):
        weight = folded[:, :, None, None]
        return fused_convolution_relu(x, weight, shift, residual, (1, 1), (0, 0), (1, 1))
    out = to_map(torch.addmm(shift, rows, folded.T), x)
    if residual is not None:
        out += residual
    return out.relu_() if relu else out


@expansion.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    batch, _, height, width = x.shape
    return x.new_empty(batch, height, width, weight.shape[0]).permute(0, 3, 1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, norm_weight, norm_bias, residual, folded, _, *moments, relu, masked = inputs
    ctx.save_for_backward(x, weight, folded, *moments, output if relu and not masked else None)
    ctx.has = norm_weight is not None, norm_bias is not None, residual is not None


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """In operators of PyTorch but for the large products, for torch.compile to fuse with what is around."""
    x, weight, folded, spread, mean, scale, inverse, out = ctx.saved_tensors
    has_weight, has_bias, has_residual = ctx.has
    if out is not None:
        d_out = torch.where(out > 0, d_out, 0)
    products, sums = pixel_products(x, d_out)
    products = products - torch.outer(sums, mean)
    d_scale = inverse * (products * weight).sum(1)  # the sum of d_out times what is normalised
    d_weight = scale[:, None] * (products - (inverse * d_scale)[:, None] * spread)
    # Of what enters the norm: scale (d_out - mean of d_out - normalised x mean of (d_out x normalised)), in terms of x.
    count = x.numel() // x.shape[1]
    slope = -scale * inverse * d_scale / count
    rounded = torch.promote_types(x.dtype, torch.bfloat16)  # float16 may be too narrow for these
    square = (weight.to(rounded).T @ (slope[:, None] * weight).to(rounded)).to(x.dtype)
    level = -(scale * sums / count) @ weight - mean @ square.float()
    d_x = sum_of_products(d_out, folded, x, square, level.to(x.dtype))
    d_norm = d_scale if has_weight else None, sums if has_bias else None
    return d_x, d_weight, *d_norm, d_out if has_residual else None, *(None,) * 8


expansion.register_autograd(_gradient, setup_context=_save)
