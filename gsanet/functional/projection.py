"""The projection to queries, keys and values: a 1x1 convolution, by what computes it fastest."""

import torch
import torch.nn.functional as F
from torch import Tensor


def project(x: Tensor, weight: Tensor) -> Tensor:
    """A product for each pixel: (batch, x, y, channels out), in this order of memory.

    Args:
        x: (batch, channels, x, y).
        weight: (channels out, channels).
    """
    if not is_for_convolution(x):
        return F.linear(x.permute(0, 2, 3, 1), weight)
    return F.conv2d(x, weight[:, :, None, None]).permute(0, 2, 3, 1).contiguous()


def is_for_convolution(x: Tensor) -> bool:
    """Whether a convolution is the faster product: on CPUs of AMD oneDNN is, twice as fast as MKL, and never slower."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and has_onednn(x.dtype)


@torch.compiler.assume_constant_result
def has_onednn(dtype: torch.dtype) -> bool:
    """Whether this PyTorch has oneDNN for its convolutions, on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
