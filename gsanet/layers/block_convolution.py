"""The convolution of a stem, over blocks of pixels where that is faster: see `gsanet.functional.blocks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, fx, nn

from gsanet.functional.blocks import convolve_blocks, pays

__all__ = ["BlockConv2d"]


class BlockConv2d(nn.Conv2d):
    """`nn.Conv2d`, with zeros as padding, that goes over blocks of 2 x 2 pixels where it has a stride of 2."""

    @classmethod
    def take_over(cls, convolution: nn.Conv2d) -> BlockConv2d:
        """The same convolution with the same parameters, not copies of them."""
        new = cls(
            convolution.in_channels,
            convolution.out_channels,
            convolution.kernel_size,  # type: ignore[arg-type]
            convolution.stride,  # type: ignore[arg-type]
            convolution.padding,  # type: ignore[arg-type]
            convolution.dilation,  # type: ignore[arg-type]
            convolution.groups,
            bias=convolution.bias is not None,
            device="meta",  # nothing is stored before it is known
        )
        new.weight, new.bias = convolution.weight, convolution.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the map."""
        assert not isinstance(self.padding, str)
        return convolution(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@fx.wrap  # one step for torch.fx, which could not follow the choice inside of it
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv2d`."""
    if pays(x, weight, stride, padding, dilation, groups):
        return convolve_blocks(x, weight, bias, padding)
    return F.conv2d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)
