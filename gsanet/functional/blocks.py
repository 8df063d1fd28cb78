"""A convolution with stride 2 over images, as one with stride 1 over blocks of 2 x 2 pixels: the same sums.

The first convolution of a ResNet reads 3 channels. Tensor cores work on 8 and more, so that cuDNN copies the image to 8
channels, five of them zeros, and multiplies them too. A block of 2 x 2 pixels has 12 channels, 16 with zeros: the 7 x 7
kernel becomes 4 x 4, and of its 256 products for an output 147 count instead of 147 of 392. Where it runs in 16 bits on
an NVIDIA GPU this is more than twice as fast, forward and backward (benchmarks/NOTES.md).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gsanet.functional.autocast import autocast_dtype
from gsanet.functional.exporting import is_exporting

__all__ = ["convolve_blocks", "pays", "to_blocks"]

DTYPES = (torch.float16, torch.bfloat16)
MOST_CHANNELS = 4  # of which blocks have 16: with more, the image itself fills the tensor cores
ALIGNED = 8  # channels that cuDNN's kernels want in multiples


def pays(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> bool:
    """Whether a convolution is better done over blocks: by its settings, where it runs and in which precision."""
    return (
        x.is_cuda
        and x.dim() == 4
        and _dtype(x) in DTYPES
        and tuple(stride) == (2, 2)
        and tuple(dilation) == (1, 1)
        and groups == 1
        and x.shape[1] <= MOST_CHANNELS
        and min(weight.shape[2:]) > 2
        and not is_exporting()
    )


def convolve_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """The convolution with stride 2, of (batch, channels, height, width)."""
    dtype = _dtype(x)  # before the copies, which are then of half the size
    return F.conv2d(*to_blocks(x.to(dtype), weight.to(dtype), padding), bias)


def to_blocks(x: Tensor, weight: Tensor, padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Image and kernel over blocks, zeros around the image included: without padding and stride they give the same.

    Args:
        x: (batch, channels, height, width).
        weight: (channels out, channels, kernel height, kernel width).
        padding: Zeros around the image, down and along.
    """
    around_x: list[int] = []
    around_weight: list[int] = []
    for size, taps, zeros in zip(x.shape[:1:-1], weight.shape[:1:-1], reversed(padding), strict=True):  # width first
        # With a tap of zero before the first an odd padding is even, and the first tap is the first of a block.
        before = zeros % 2
        blocks = (taps + before + 1) // 2
        out = (size + 2 * zeros - taps) // 2 + 1
        around_weight += [before, 2 * blocks - taps - before]
        around_x += [zeros + before, 2 * (out + blocks - 1) - size - zeros - before]
    missing = -4 * x.shape[1] % ALIGNED
    return _blocks(x, around_x, missing), _blocks(weight, around_weight, missing)


def _blocks(x: Tensor, around: Sequence[int], channels: int) -> Tensor:
    """2 x 2 pixels as channels, behind zeros around the map; `channels` more of zeros."""
    return F.pad(F.pixel_unshuffle(F.pad(x, around), 2), (0, 0, 0, 0, 0, channels)).contiguous(
        memory_format=torch.channels_last
    )


def _dtype(x: Tensor) -> torch.dtype:
    """What a convolution of x is computed in."""
    return autocast_dtype(x) or x.dtype
