"""A 1x1 convolution to more channels with the batch norm behind it, in training, that never has the map between them.

The mean and variance of z = x W^T follow from those of x: W m and the diagonal of W C W^T, where m is the mean of the
pixels and C the covariance of their channels. So the norm is known before z is, and is folded into the weight as in
inference: one product, with a residual and a ReLU in its epilogue, in the place of a product, two passes over z for
the norm and one for the sum. Backward the same holds: all that the gradient of a batch norm needs of z is in the sums
over pixels of products of d_out and x, which the gradient of W needs anyway; z is neither read nor kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gsanet.functional.autocast import autocast_dtype
from gsanet.functional.fused import expansion_ops
from gsanet.functional.fused.norms import applied_with, in_float32, keep_statistics, takes_map

DTYPES = (torch.float16, torch.bfloat16)

# Products over channels in take the place of passes over channels out: beyond this many of the first, and below twice
# as many of the second, they take longer; and with fewer numbers in a map all of it is a matter of launches.
MOST_CHANNELS_IN = 256
LEAST_NUMBERS = 2**24

wanted = True  # whether blocks that `takes` takes are computed so; read when they are compiled


class Moments(NamedTuple):
    """What a batch norm behind a convolution applies, from the moments of the convolution's input. All in float32."""

    mean_in: Tensor  # of x, (channels in,)
    spread: Tensor  # the weight times the covariance of x, (channels, channels in)
    applied: Tensor  # scale, shift, mean, 1 / standard deviation and variance, (5, channels)


def takes(x: Tensor, convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> bool:
    """Whether `expand` takes a map, and is faster than convolution and norm.

    Args:
        x: (batch, channels, height, width).
        convolution: 1 x 1 pixels with a stride of 1, in one group, without a bias.
        norm: It must be in training.
    """
    if not wanted or not norm.training or not takes_map(x) or x.dtype not in DTYPES:
        return False
    channels, channels_in = convolution.weight.shape[:2]
    if channels_in > MOST_CHANNELS_IN or channels < 2 * channels_in or channels % 8 or x.shape[1] != channels_in:
        return False
    if x.numel() // channels_in * channels < LEAST_NUMBERS or channels != norm.num_features:
        return False
    tensors = (convolution.weight, norm.weight, norm.running_mean)
    return is_cast(convolution.weight, x) and all(one is None or one.device == x.device for one in tensors)


def expand(
    x: Tensor,
    convolution: nn.Conv2d,
    norm: nn.BatchNorm2d,
    residual: Tensor | None = None,
    relu: bool = False,
    masked: bool = False,
) -> Tensor:
    """relu(norm(convolution(x)) + residual), for what `takes` takes; residual and ReLU as they are given.

    `masked`: the gradient of the output is zero already where the output is, as `entry.py` leaves it.
    """
    with torch.autocast(x.device.type, enabled=False):
        weight = convolution.weight.flatten(1).float()
        norm_weight, norm_bias = in_float32(norm)
        with torch.no_grad():
            found = moments(x, weight, norm_weight, norm_bias, norm.eps)
            keep_statistics(norm, found.applied, x.numel() // x.shape[1])
            scale, shift, _, inverse, _ = found.applied.unbind()
            folded = (weight * scale[:, None]).to(x.dtype)
        return expansion_ops.expansion(
            x, weight, norm_weight, norm_bias, None if residual is None else residual.to(x.dtype),
            folded, shift.to(x.dtype), found.spread, found.mean_in, scale, inverse, relu, masked,
        )  # fmt: skip


def moments(x: Tensor, weight: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, epsilon: float) -> Moments:
    """Of x weight^T, in float32, from the products and sums of the channels of x."""
    count = x.numel() // x.shape[1]
    products, sums = expansion_ops.pixel_products(x, None)
    mean_in = sums / count
    spread = weight @ (products / count - torch.outer(mean_in, mean_in))
    variance = (spread * weight).sum(1).clamp_min(0)
    return Moments(mean_in, spread, applied_with(weight @ mean_in, variance, norm_weight, norm_bias, epsilon))


def is_cast(weight: Tensor, x: Tensor) -> bool:
    """Whether a convolution would take a weight in the dtype of x, by itself or by autocast."""
    return x.dtype in (weight.dtype, autocast_dtype(x))
