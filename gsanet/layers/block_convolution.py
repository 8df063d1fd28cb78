"""The convolution of a stem, over blocks of pixels where that is faster: see `gsanet.functional.blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from gsanet.functional.blocks import convolve_blocks, pays

__all__ = ["PLAIN", "BlockConv2d", "settings_of"]


class BlockConv2d(nn.Conv2d):
    """`nn.Conv2d`, with zeros as padding, that goes over blocks of 2 x 2 pixels where it has a stride of 2."""

    @classmethod
    def take_over(cls, convolution: nn.Conv2d) -> BlockConv2d:
        """The same convolution with the same parameters, not copies of them."""
        new = cls(**settings_of(convolution))
        new.weight, new.bias = convolution.weight, convolution.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the map."""
        assert not isinstance(self.padding, str)
        return convolution(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


# Exactly these convolve, and do nothing else.
PLAIN = (nn.Conv2d, BlockConv2d)


def settings_of(convolution: nn.Conv2d) -> dict[str, Any]:
    """What makes another convolution of the same settings, without memory: its parameters are to be taken over."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    settings = {name: getattr(convolution, name) for name in names}
    return {**settings, "bias": convolution.bias is not None, "device": "meta"}


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
