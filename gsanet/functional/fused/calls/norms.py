"""Batch norms and the pooling behind one: `kernels/norm.cu`, `channel_sums.cu`, `norm_sums.cu` and `norm_pool.cu`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.calls.tensors import pointer
from gsanet.functional.fused.plan import plan_kept, plan_norm, plan_pool, plan_sums


def norm_statistics(
    statistics: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, count: int, epsilon: float
) -> Tensor:
    """Of a batch norm: scale, shift, mean, 1 / standard deviation and variance, (5, channels)."""
    applied = torch.empty(5, statistics.shape[2], dtype=torch.float32, device=statistics.device)
    values = arguments.Norm(
        partial=statistics.data_ptr(),
        centre=centre.data_ptr(),
        weight=pointer(weight),
        bias=pointer(bias),
        applied=applied.data_ptr(),
        blocks=statistics.shape[0],
        channels=statistics.shape[2],
        count=count,
        epsilon=epsilon,
    )
    launching.start(plan_norm(statistics.shape[2], "norm_statistics"), values, statistics)
    return applied


def norm_gradient(statistics: Tensor, applied: Tensor, count: int, fixed: bool) -> Tensor:
    """Of a batch norm: a, b and c of dx = a * dy + b * x + c, gradient of the weight, of the bias; (5, channels)."""
    coefficients = torch.empty_like(applied)
    values = arguments.Norm(
        partial=statistics.data_ptr(),
        applied=applied.data_ptr(),
        coefficients=coefficients.data_ptr(),
        blocks=statistics.shape[0],
        channels=statistics.shape[2],
        count=count,
        fixed=fixed,
    )
    launching.start(plan_norm(statistics.shape[2], "norm_gradient"), values, statistics)
    return coefficients


def keep_statistics(
    running_mean: Tensor, running_variance: Tensor, batches: Tensor, applied: Tensor, count: int, share: float
) -> None:
    """Bring what a batch norm keeps up to date, in place.

    Args:
        running_mean: (channels), in float32, contiguous.
        running_variance: The same.
        batches: How many there were, an int64.
        applied: From `norm_statistics`.
        count: Values of a channel.
        share: Of this batch.
    """
    values = arguments.Norm(
        applied=applied.data_ptr(),
        channels=applied.shape[1],
        count=count,
        running_mean=running_mean.data_ptr(),
        running_variance=running_variance.data_ptr(),
        batches=batches.data_ptr(),
        share=share,
    )
    launching.start(plan_kept(applied.shape[1]), values, applied)


def channel_sums(x: Tensor, centre: Tensor) -> Tensor:
    """Of a map (batch, x, y, channel): sums of x - centre and of its square for each channel, (blocks, 2, channels)."""
    values = arguments.ChannelSums(x=x.data_ptr(), centre=centre.data_ptr(), **_of_rows(x))
    return _sum_channels("channel_sums", x, values)


def norm_sums(x: Tensor, d_out: Tensor, applied: Tensor, relu: bool) -> Tensor:
    """The sums that `norm_gradient` takes, of a batch norm of x and a ReLU; both maps are (batch, x, y, channel)."""
    values = arguments.NormSums(x=x.data_ptr(), d_out=d_out.data_ptr(), applied=applied.data_ptr(), **_of_rows(x))
    return _sum_channels("norm_sums", x, values, relu=relu)


def pixel_sums(rows: Tensor) -> Tensor | None:
    """The sums over pixels of (pixels, channels), in float32; None for rows that the kernel does not take."""
    if not rows.is_contiguous() or rows.data_ptr() % 16 or rows.shape[1] % 8 or not rows.numel():
        return None
    zeros = rows.new_zeros(rows.shape[1], dtype=torch.float32)
    return channel_sums(rows[None, None], zeros)[:, 0].sum(0)


class Pooled(NamedTuple):
    """The output of `norm_pool`; with a norm the raw value that it comes from and that one's place in the window."""

    out: Tensor
    peak: Tensor | None
    place: Tensor | None


def norm_pool(x: Tensor, applied: Tensor | None) -> Pooled:
    """Max pooling of 3 x 3 pixels, stride 2, padding 1.

    Args:
        x: (batch, x, y, channel).
        applied: Of the batch norm before it, from `norm_statistics`, which a ReLU follows; None for neither.
    """
    batch, height, width, channels = x.shape
    out = x.new_empty(batch, -(-height // 2), -(-width // 2), channels)
    peak = None if applied is None else torch.empty_like(out)
    place = None if applied is None else torch.empty_like(out, dtype=torch.uint8)
    plan, strip = plan_pool(launching.machine_for(x), x.dtype, *x.shape, "norm_pool", applied is not None)
    values = arguments.NormPool(
        **_of_map(x),
        applied=pointer(applied),
        out=out.data_ptr(),
        peak=pointer(peak),
        place=pointer(place),
        strip=strip,
    )
    launching.start(plan, values, x)
    return Pooled(out, peak, place)


def norm_pool_sums(x: Tensor, d_out: Tensor, peak: Tensor, applied: Tensor) -> Tensor:
    """The sums that `norm_gradient` takes, of the batch norm before a ReLU and max pooling; `x` only for its shape."""
    values = arguments.NormPool(**_of_map(x), applied=applied.data_ptr(), peak=peak.data_ptr(), d_out=d_out.data_ptr())
    return _sum_channels("norm_pool_sums", d_out, values, norm=True)


def norm_pool_gradient(x: Tensor, d_out: Tensor, place: Tensor, coefficients: Tensor) -> Tensor:
    """The gradient of the input of a batch norm, ReLU and max pooling; `coefficients` are those of `norm_gradient`."""
    d_x = torch.empty_like(x)
    plan, strip = plan_pool(launching.machine_for(x), x.dtype, *x.shape, "norm_pool_gradient", norm=True)
    values = arguments.NormPool(
        **_of_map(x),
        coefficients=coefficients.data_ptr(),
        place=place.data_ptr(),
        d_out=d_out.data_ptr(),
        d_x=d_x.data_ptr(),
        strip=strip,
    )
    launching.start(plan, values, x)
    return d_x


def _sum_channels(entry: str, like: Tensor, values: Any, **features: bool) -> Tensor:
    """Launch a kernel that takes two sums for each channel of maps like this one; (blocks, 2, channels).

    Args:
        entry: The kernel.
        like: (batch, x, y, channel).
        values: Its arguments, but for where the sums go and how blocks share the channels.
        features: Its switches.
    """
    rows, channels = like.shape[:3].numel(), like.shape[3]
    plan, values.groups = plan_sums(launching.machine_for(like), like.dtype, rows, channels, entry, **features)
    partial = like.new_empty(plan.grid[0], 2, channels, dtype=torch.float32)
    values.partial = partial.data_ptr()
    launching.start(plan, values, like)
    return partial


def _of_rows(x: Tensor) -> dict[str, int]:
    return {"rows": x.shape[:3].numel(), "channels": x.shape[3]}


def _of_map(x: Tensor) -> dict[str, int]:
    images, height, width, channels = x.shape
    return {"x": x.data_ptr(), "images": images, "height": height, "width": width, "channels": channels}
