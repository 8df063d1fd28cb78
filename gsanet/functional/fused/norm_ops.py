"""Batch norms as operators of PyTorch, for training: their statistics, and the one before a ReLU and max pooling.

`gsanet::channel_statistics` takes the statistics of a map at the speed of the memory, `gsanet::norm_gradient` the sums
that a norm's gradient needs; the rest of both is left to torch.compile. `gsanet::keep_statistics` brings what a norm
keeps up to date, for which torch.compile would launch a kernel for each tensor. `gsanet::norm_relu_max_pool` is the
tail of a ResNet's stem, which writes nothing of the size of its input, with its gradient. `gsanet::max_pool` is what is
left of it in inference.
"""

from typing import Any

import torch
from torch import Tensor

from gsanet.functional.fused import calls
from gsanet.functional.fused.gradients import differentiate_first
from gsanet.functional.inference_only import refuse_gradients


@torch.library.custom_op("gsanet::channel_statistics", mutates_args=())
def channel_statistics(x: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Of a batch norm: scale, shift, mean, 1 / standard deviation and variance, (5, channels) in float32.

    Args:
        x: (batch, channels, height, width), a multiple of 8 channels.
        centre: A guess of the mean, such as the running one, in float32: the nearer, the more precise.
        weight: Of the norm, in float32, or None.
        bias: The same.
        epsilon: Added to the variance.
    """
    return _statistics(_in_order(x), centre, weight, bias, epsilon)


@channel_statistics.register_fake
def _(x: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return x.new_empty(5, x.shape[1], dtype=torch.float32)


@torch.library.custom_op("gsanet::keep_statistics", mutates_args=("running_mean", "running_variance", "batches"))
def keep_statistics(
    running_mean: Tensor, running_variance: Tensor, batches: Tensor, applied: Tensor, count: int, share: float
) -> None:
    """What a batch norm in training does with its running statistics, in place.

    Args:
        running_mean: (channels), in float32.
        running_variance: The same.
        batches: How many there were, an int64, which is counted up.
        applied: From `channel_statistics`.
        count: Values of a channel.
        share: Of this batch in the statistics, the norm's `momentum`.
    """
    calls.keep_statistics(running_mean, running_variance, batches, applied, count, share)


@keep_statistics.register_fake
def _(*_: Any) -> None:
    pass


@torch.library.custom_op("gsanet::norm_gradient", mutates_args=())
def norm_gradient(d_out: Tensor, x: Tensor, applied: Tensor, relu: bool) -> Tensor:
    """What the gradient of a batch norm with the statistics of this batch consists of, (5, channels) in float32.

    Rows a, b and c of d_x = a * d_out + b * x + c, where d_out is zero where the ReLU is closed, and the gradients of
    the weight and of the bias.

    Args:
        d_out: (batch, channels, height, width), a multiple of 8 channels.
        x: The norm's input, the same.
        applied: From `channel_statistics`.
        relu: Whether a ReLU follows.
    """
    x = _in_order(x)
    sums = calls.norm_sums(x, _in_order(d_out), applied, relu)
    return calls.norm_gradient(sums, applied, x.shape[:3].numel(), fixed=False)


@norm_gradient.register_fake
def _(d_out: Tensor, x: Tensor, applied: Tensor, relu: bool) -> Tensor:
    return torch.empty_like(applied)


@torch.library.custom_op("gsanet::norm_relu_max_pool", mutates_args=())
def norm_relu_max_pool(
    x: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch norm with the statistics of this batch, ReLU, and max pooling of 3 x 3 pixels, stride 2, padding 1.

    Args:
        x: (batch, channels, height, width), a multiple of 8 channels.
        centre: As in `channel_statistics`.
        weight: The same.
        bias: The same.
        epsilon: The same.

    Returns:
        The output; of each window the input where the output comes from, and its place, 0 to 8 by rows, or 15 where
        the output is 0; and the result of `channel_statistics`.
    """
    x = _in_order(x)
    applied = _statistics(x, centre, weight, bias, epsilon)
    pooled = calls.norm_pool(x, applied)
    assert pooled.peak is not None
    assert pooled.place is not None
    return _to_feature_map(pooled.out), _to_feature_map(pooled.peak), _to_feature_map(pooled.place), applied


@norm_relu_max_pool.register_fake
def _(
    x: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, peak = _fake_pooled(x), _fake_pooled(x)
    return out, peak, torch.empty_like(out, dtype=torch.uint8), x.new_empty(5, x.shape[1], dtype=torch.float32)


@torch.library.custom_op("gsanet::norm_relu_max_pool_gradient", mutates_args=())
def norm_relu_max_pool_gradient(
    d_out: Tensor, x: Tensor, peak: Tensor, place: Tensor, applied: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and (2, channels) those of the weight and of the bias."""
    x, d_out = _in_order(x), _in_order(d_out)
    sums = calls.norm_pool_sums(x, d_out, _in_order(peak), applied)
    coefficients = calls.norm_gradient(sums, applied, x.shape[:3].numel(), fixed=False)
    d_x = calls.norm_pool_gradient(x, d_out, _in_order(place), coefficients)
    return _to_feature_map(d_x), coefficients[3:5].clone()


@norm_relu_max_pool_gradient.register_fake
def _(d_out: Tensor, x: Tensor, peak: Tensor, place: Tensor, applied: Tensor) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = x.shape
    d_x = x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    return d_x, applied.new_empty(2, channels)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weight, bias, _ = inputs
    ctx.save_for_backward(x, *output[1:])
    ctx.has_norm = weight is not None, bias is not None
    differentiate_first(ctx, output)


def _gradient(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_norm = norm_relu_max_pool_gradient(d_out, *ctx.saved_tensors)
    d_weight, d_bias = (gradient if has else None for gradient, has in zip(d_norm, ctx.has_norm, strict=True))
    return d_x, None, d_weight, d_bias, None


norm_relu_max_pool.register_autograd(_gradient, setup_context=_save)


@torch.library.custom_op("gsanet::max_pool", mutates_args=())
def max_pool(x: Tensor) -> Tensor:
    """Max pooling of 3 x 3 pixels, stride 2, padding 1, of a map with a multiple of 8 channels; without a gradient."""
    return _to_feature_map(calls.norm_pool(_in_order(x), None).out)


@max_pool.register_fake
def _(x: Tensor) -> Tensor:
    return _fake_pooled(x)


refuse_gradients(max_pool)


def _statistics(x: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    if centre.data_ptr() % 16:
        centre = centre.clone()  # a part of a larger tensor: it is read 16 bytes at a time
    sums = calls.channel_sums(x, centre)
    return calls.norm_statistics(sums, centre, weight, bias, x.shape[:3].numel(), epsilon)


def _in_order(x: Tensor) -> Tensor:
    """A feature map as (batch, x, y, channel), a view if it is channels-last already, at a multiple of 16 bytes."""
    x = x.permute(0, 2, 3, 1).contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _to_feature_map(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _fake_pooled(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    return x.new_empty(batch, (height + 1) // 2, (width + 1) // 2, channels).permute(0, 3, 1, 2)
