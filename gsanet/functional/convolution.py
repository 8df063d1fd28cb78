"""A convolution with what follows it in inference: bias, residual and ReLU in one pass over memory.

On an NVIDIA GPU, in 16 bits, it is an operator around cuDNN's fused convolutions, to which neither eager PyTorch nor
`torch.compile` comes by itself, and around kernels of this package for 1x1 convolutions. On a CPU, in float32 and
bfloat16, 1x1 convolutions of few pixels are a kernel too, and with one thread all of them. Everywhere else it is
PyTorch's own operations, which any device, exporter and autograd know.
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from gsanet.functional.backends import is_differentiated
from gsanet.functional.blocks import pays, to_blocks
from gsanet.functional.exporting import is_exporting
from gsanet.functional.fused import pointwise
from gsanet.functional.inference_only import refuse_gradients
from gsanet.functional.native import pointwise as native_pointwise
from gsanet.functional.transforms import is_transformed

__all__ = ["convolution_relu", "pointwise_convolution"]

# float32 stays with PyTorch: cuDNN may round it to TF32 here, whatever the precision of other convolutions.
DTYPES = (torch.float16, torch.bfloat16)

# What cuDNN refused once: it is not asked again.
_refused: set[Hashable] = set()


def convolution_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """relu(convolution of x + bias + residual).

    Args:
        x: (batch, channels, height, width).
        weight: (channels out, channels, kernel height, kernel width).
        bias: (channels out,).
        residual: Added before the ReLU, of the output's shape; None for nothing.
        stride: Down and along.
        padding: Zeros on each side, the same.
        dilation: The same.
    """
    if _is_for_operator(x, weight, bias, residual, stride, padding, dilation):
        if pays(x, weight, stride, padding, dilation):
            x, weight = to_blocks(x, weight, padding)
            stride, padding = (1, 1), (0, 0)
        return fused_convolution_relu(x, weight, bias, residual, stride, padding, dilation)
    out = native_pointwise.convolve(x, weight, bias, residual, relu=True, stride=stride, padding=padding)
    return _in_steps(x, weight, bias, residual, stride, padding, dilation) if out is None else out


def pointwise_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int] = (1, 1)) -> Tensor:
    """A 1x1 convolution, as `torch.nn.functional.conv2d`, with nothing behind it.

    Args:
        x: (batch, channels, height, width).
        weight: (channels out, channels, 1, 1).
        bias: (channels out,), or None.
        stride: Down and along.
    """
    if pointwise.wanted and is_for_operators(x, weight, *(() if bias is None else (bias,))):
        return fused_pointwise_convolution(x, weight, bias, stride)
    out = native_pointwise.convolve(x, weight, bias, relu=False, stride=stride)
    return F.conv2d(x, weight, bias, tuple(stride)) if out is None else out


def is_for_operators(x: Tensor, *others: Tensor) -> bool:
    """Whether a map and what is to be done with it, of one dtype on one device, is for operators of this package."""
    if not _is_on_gpu(x) or x.dtype not in DTYPES or x.dim() != 4 or is_exporting() or is_transformed():
        return False
    if any(tensor.dtype != x.dtype or tensor.device != x.device for tensor in others):  # as autocast may leave them
        return False
    return not is_differentiated(x, *others)


def _is_for_operator(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *settings: Sequence[int]
) -> bool:
    if residual is None:
        return is_for_operators(x, weight, bias)
    # A residual that is spread over the map is PyTorch's business.
    return is_for_operators(x, weight, bias, residual) and tuple(residual.shape) == _shape(x, weight, *settings)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _in_steps(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *settings: Sequence[int]) -> Tensor:
    stride, padding, dilation = map(tuple, settings)
    out = F.conv2d(x, weight, bias, stride, padding, dilation)
    if residual is None:
        return out.relu_()
    if out.shape == residual.shape and out.dtype == residual.dtype and not is_transformed():
        return out.add_(residual).relu_()  # in no memory of its own, which counts on a CPU
    return (out + residual).relu_()


def _shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int, int, int]:
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    )
    return x.shape[0], weight.shape[0], height, width


@torch.library.custom_op("gsanet::convolution_relu", mutates_args=())
def fused_convolution_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """As `convolution_relu`, for tensors of one dtype on one device; the output is channels-last."""
    x = x.contiguous(memory_format=torch.channels_last)
    ours = pointwise.convolve_few(x, weight, bias, residual, relu=True, stride=stride, padding=padding)
    if ours is None:
        ours = pointwise.convolve_many(x, weight, bias, residual, stride, padding)
    if ours is not None:
        return ours
    settings = tuple(stride), tuple(padding), tuple(dilation)
    key = x.device, x.dtype, tuple(x.shape), tuple(weight.shape), residual is not None, settings
    out = None
    if key not in _refused and _may_use_cudnn():
        try:
            with _measured_choice():
                if residual is None:
                    out = torch.cudnn_convolution_relu(x, weight, bias, *settings, 1)
                else:
                    out = torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *settings, 1)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # no engine for this shape on this GPU, or no cuDNN at all
            _refused.add(key)
    if out is None:
        out = _in_steps(x, weight, bias, residual, *settings)
    return out.contiguous(memory_format=torch.channels_last)


def _measured_choice() -> AbstractContextManager[None]:
    """Have cuDNN time its engines at the first call with a shape, and keep the fastest."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32)


def _may_use_cudnn() -> bool:
    """Its fused convolutions do not look at these settings themselves."""
    cudnn = torch.backends.cudnn
    return bool(cudnn.enabled and not cudnn.deterministic and not torch.are_deterministic_algorithms_enabled())


@fused_convolution_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *settings: Sequence[int]) -> Tensor:
    batch, channels, height, width = _shape(x, weight, *settings)
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


refuse_gradients(fused_convolution_relu)


@torch.library.custom_op("gsanet::pointwise_convolution", mutates_args=())
def fused_pointwise_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int]) -> Tensor:
    """As `pointwise_convolution`, for tensors of one dtype on one device; the output is channels-last."""
    x = x.contiguous(memory_format=torch.channels_last)
    out = pointwise.convolve_few(x, weight, bias, relu=False, stride=stride)
    if out is None:
        out = F.conv2d(x, weight, bias, tuple(stride))
    return out.contiguous(memory_format=torch.channels_last)


@fused_pointwise_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int]) -> Tensor:
    batch, channels, height, width = _shape(x, weight, stride, (0, 0), (1, 1))
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


refuse_gradients(fused_pointwise_convolution)
