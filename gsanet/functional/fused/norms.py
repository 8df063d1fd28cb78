"""Batch norms and max pooling of networks on NVIDIA GPUs, where kernels are faster than what they take the place of."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from gsanet.functional.exporting import is_exporting
from gsanet.functional.fused import available, norm_ops


def takes(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Whether the functions of this module take a map and its norm; what they do not take is PyTorch's.

    Args:
        x: (batch, channels, height, width).
        norm: It must be in training; hooks on it are the caller's concern.
    """
    if not norm.training or not takes_map(x):
        return False
    batch, channels, height, width = x.shape
    if channels != norm.num_features or batch * height * width < 2:
        return False
    return all(one is None or one.device == x.device for one in (norm.weight, norm.running_mean))


def batch_norm(x: Tensor, norm: nn.BatchNorm2d, relu: bool = False) -> Tensor:
    """As `norm(x)`, or `relu(norm(x))`, for what `takes` takes; for torch.compile, to which all but sums is left."""
    out, applied = _BatchNorm.apply(x, centre_of(norm, x), *in_float32(norm), norm.eps, relu)
    keep_statistics(norm, applied, x.numel() // x.shape[1])
    return out


class _BatchNorm(torch.autograd.Function):
    """A norm, perhaps with a ReLU, and what it applies.

    Only the input is kept: the gradient works out from it where the ReLU was open.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, centre: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, relu: bool
    ) -> tuple[Tensor, Tensor]:
        # Before the statistics: of what comes behind another operator torch.compile would rather keep a result, in
        # float32, than work it out again in the backward pass.
        wide = x.float()
        applied = norm_ops.channel_statistics(x, centre, weight, bias, epsilon)
        ctx.save_for_backward(x, applied)
        ctx.relu, ctx.has_norm = relu, (weight is not None, bias is not None)
        ctx.mark_non_differentiable(applied)
        out = _normalised(wide, applied)
        out = out.relu() if relu else out
        # Not `out.to(x.dtype)` in float32, which is `out` itself: torch.compile of PyTorch 2.11 then loses gradients.
        return out if out.dtype == x.dtype else out.to(x.dtype), applied

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, applied = ctx.saved_tensors
        coefficients = norm_ops.norm_gradient(d_out, x, applied, ctx.relu)
        # About the mean, so that no large numbers cancel.
        scale, slope, mean = (row.view(1, -1, 1, 1) for row in (coefficients[0], coefficients[1], applied[2]))
        level = coefficients[4].view(1, -1, 1, 1) * scale / -(x.numel() // x.shape[1])
        wide, d_wide = x.float(), d_out.float()
        if ctx.relu:
            d_wide = torch.where(_normalised(wide, applied) <= 0, 0.0, d_wide)  # what is not a number is kept
        d_x = (d_wide * scale + (wide - mean) * slope + level).to(x.dtype)
        d_weight, d_bias = (coefficients[3 + i] if has else None for i, has in enumerate(ctx.has_norm))
        return d_x, None, d_weight, d_bias, None, None


def _normalised(wide: Tensor, applied: Tensor) -> Tensor:
    scale, shift, mean = (applied[row].view(1, -1, 1, 1) for row in range(3))
    return (wide - mean) * scale + (shift + mean * scale)


def norm_relu_max_pool(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Max pooling, 3 x 3 pixels with a stride of 2 and a padding of 1, of relu(norm(x)); for what `takes` takes.

    The same as the three layers one after the other, but that the maximum is found before anything is rounded.
    """
    weight, bias = in_float32(norm)
    out, _, _, applied = norm_ops.norm_relu_max_pool(x, centre_of(norm, x), weight, bias, norm.eps)
    keep_statistics(norm, applied, x.numel() // x.shape[1])
    return out


def is_halving(pool: nn.MaxPool2d) -> bool:
    """Whether a layer is the max pooling of this module, 3 x 3 pixels with a stride of 2 and a padding of 1."""
    settings = [to_2tuple(value) for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
    return settings == [(3, 3), (2, 2), (1, 1), (1, 1)] and not (pool.return_indices or pool.ceil_mode)


def max_pool(x: Tensor) -> Tensor:
    """Max pooling, 3 x 3 pixels with a stride of 2 and a padding of 1; on a GPU, without gradients, by a kernel."""
    if takes_map(x) and x.numel() and not (torch.is_grad_enabled() and x.requires_grad):
        return norm_ops.max_pool(x)
    return F.max_pool2d(x, 3, 2, 1)


def uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Whether a norm applies the statistics of the batch."""
    return norm.training or norm.running_mean is None


def centre_of(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """What sums for a norm's statistics are taken about: its running mean, in float32."""
    if norm.running_mean is None:
        return x.new_zeros(norm.num_features, dtype=torch.float32)
    return norm.running_mean.float()


@torch.no_grad()
def keep_statistics(norm: nn.BatchNorm2d, applied: Tensor, count: int) -> None:
    """Bring a norm's running statistics up to date, where `norm(x)` would; it need not have any.

    Args:
        norm: The norm.
        applied: Scale, shift, mean, 1 / standard deviation and variance of the batch, (5, channels).
        count: How many numbers of each channel these are of.
    """
    if not (norm.training and norm.track_running_stats):
        return
    kept = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if norm.momentum is not None and _are_as_usual(kept, applied):
        norm_ops.keep_statistics(*kept, applied, count, norm.momentum)
        return
    share: Tensor | float = norm.momentum or 0.0
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            share = 1.0 / norm.num_batches_tracked.float()
    mean, variance = applied[2], applied[4] * (count / (count - 1))
    for running, value in ((norm.running_mean, mean), (norm.running_var, variance)):
        if running is not None:
            running.lerp_(value.to(running.dtype), share)


def _are_as_usual(kept: tuple[Tensor | None, ...], applied: Tensor) -> bool:
    """Whether a kernel can bring what a norm keeps up to date: mean, variance, and the number of batches."""
    dtypes = (torch.float32, torch.float32, torch.int64)
    return available.runs_on_device(applied) and all(
        one is not None and one.dtype == dtype and one.device == applied.device and one.is_contiguous()
        for one, dtype in zip(kept, dtypes, strict=True)
    )


def applied_in_evaluation(norm: nn.BatchNorm2d) -> Tensor:
    """What a batch norm with running statistics applies: scale, shift, mean, 1 / standard deviation, variance."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return applied_with(norm.running_mean.float(), norm.running_var.float(), *in_float32(norm), norm.eps)


@torch.no_grad()
def applied_with(mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """What a batch norm with these statistics applies, the same; without gradients."""
    inverse = torch.rsqrt(variance + epsilon)
    scale = inverse if weight is None else inverse * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return torch.stack((scale, shift, mean, inverse, variance))


def in_float32(norm: nn.BatchNorm2d) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a norm."""
    weight, bias = (None if tensor is None else tensor.float() for tensor in (norm.weight, norm.bias))
    return weight, bias


def takes_map(x: Tensor) -> bool:
    """Whether operators on maps take this one, whatever follows."""
    # torch.fx calls with what is no tensor, and is to see PyTorch's operators, as torch.export is.
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] % 8 or is_exporting():
        return False
    # The operators would copy a map that is not channels-last, which takes longer than they save.
    if not x.is_contiguous(memory_format=torch.channels_last):
        return False
    return available.take(x)
