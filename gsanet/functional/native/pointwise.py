"""1x1 convolutions on a CPU by a kernel of this package, for networks from `gsanet.fuse_for_inference`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gsanet.functional import native
from gsanet.functional.backends import is_differentiated, may_use
from gsanet.functional.inference_only import refuse_gradients
from gsanet.functional.native import calls
from gsanet.functional.projection import has_onednn

# Pixels of all images up to which the kernel was seen to be faster than oneDNN, for several threads. Where PyTorch does
# not ask oneDNN, as for one thread, any number is (benchmarks/NOTES.md).
MOST_PIXELS = 1024
FEWEST_WEIGHTS = 2**12  # below which a call is hardly work


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    relu: bool,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
) -> Tensor | None:
    """A convolution with bias, residual and ReLU; None where that is PyTorch's business.

    Args:
        x: (batch, channels, height, width).
        weight: (channels out, channels, kernel height, kernel width).
        bias: (channels out,).
        residual: Of the output's shape, added before the ReLU.
        relu: Whether a ReLU follows.
        stride: Down and along.
        padding: Zeros around the map, the same.
    """
    if not _takes(x, weight, bias, residual, stride, padding):
        return None
    if torch.compiler.is_compiling():
        return pointwise(x, weight, bias, residual, relu, stride)
    return _convolve(x, weight, bias, residual, relu, stride)


def _takes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> bool:
    if not x.is_cpu or x.dim() != 4 or tuple(weight.shape[2:]) != (1, 1) or any(padding) or not may_use("native"):
        return False
    tensors = [one for one in (x, weight, bias, residual) if one is not None]
    if native.refuses_kind(x, tensors) is not None:  # before anything depends on sizes: exports have any
        return False
    if any(one.dtype != x.dtype or one.device != x.device for one in tensors) or is_differentiated(*tensors):
        return False
    batch, height, width, outputs = shape = _shape(x, weight, stride)
    pixels = batch * height * width
    if pixels == 0 or weight.numel() < FEWEST_WEIGHTS:
        return False
    if pixels > MOST_PIXELS and _has_threads() and has_onednn(x.dtype):
        return False
    if weight.shape[1] != x.shape[1] or (bias is not None and bias.shape != (outputs,)):
        return False  # PyTorch says what is wrong
    if residual is not None and residual.permute(0, 2, 3, 1).shape != shape:
        return False  # nor is a residual that is spread over the map for the kernel
    return native._unavailable() is None


@torch.compiler.assume_constant_result
def _has_threads() -> bool:
    """Whether there are several threads; a compiled network keeps the answer."""
    return torch.get_num_threads() > 1


def _shape(x: Tensor, weight: Tensor, stride: Sequence[int]) -> tuple[int, int, int, int]:
    """Of the output, as it lies in memory."""
    return x.shape[0], -(-x.shape[2] // stride[0]), -(-x.shape[3] // stride[1]), weight.shape[0]


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, stride: Sequence[int]
) -> Tensor:
    out = x.new_empty(_shape(x, weight, stride)).permute(0, 3, 1, 2)
    return calls.convolve_pointwise(
        x,
        weight.flatten(1).contiguous(),
        None if bias is None else bias.contiguous(),
        None if residual is None else residual.contiguous(memory_format=torch.channels_last),
        out,
        relu=relu,
        stride=stride,
    )


@torch.library.custom_op("gsanet::native_pointwise", mutates_args=(), device_types="cpu")
def pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, stride: Sequence[int]
) -> Tensor:
    """As `convolve`, for torch.compile."""
    return _convolve(x, weight, bias, residual, relu, stride)


@pointwise.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, stride: Sequence[int]
) -> Tensor:
    return x.new_empty(_shape(x, weight, stride)).permute(0, 3, 1, 2)


refuse_gradients(pointwise)
