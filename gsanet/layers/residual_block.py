"""timm's residual blocks; where `torch.compile` trains on a GPU their last convolution, norm, sum and ReLU are one.

In a stage a block may also leave the mask of its ReLU to the one behind it, whose first convolution has a kernel for
the gradient of all that its input goes to (`gsanet.functional.fused.entry`).
"""

from typing import Any, ClassVar

import torch
from timm.layers import ConvNormAct
from timm.models.byobnet import BottleneckBlock, SelfAttnBlock
from torch import Tensor, nn

from gsanet.functional.fused import entry
from gsanet.functional.fused.expansion import expand, takes
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.watched import is_watched

__all__ = ["CompiledBottleneckBlock", "CompiledSelfAttnBlock", "CompiledStage", "convert_blocks"]


class _Block(nn.Module):
    """What both kinds of blocks share: relu(after(conv3_1x1(branch(x))) + shortcut(x))."""

    BRANCH: ClassVar[tuple[str, ...]]
    AFTER: ClassVar[tuple[str, ...]]
    conv1_1x1: Any
    conv3_1x1: Any
    shortcut: Any
    act: Any

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the block's output."""
        if not (torch.compiler.is_compiling() and self.training and self._has_known_end()):
            out: Tensor = super().forward(x)
            return out
        return self.forward_between(x, False, None)[0]

    def forward_between(self, x: Tensor, masks: bool, following: "_Block | None") -> tuple[Tensor, bool]:
        """As `forward`, for a block that `is_known`.

        Args:
            x: (batch, channels, height, width).
            masks: x comes out of a ReLU whose mask was left to this block: `takes_mask` has said yes.
            following: The block that gets the output, if nobody else does.

        Returns:
            The output, and whether its mask is left to the following block.
        """
        if masks:
            x, residual = entry.enter(x, self.conv1_1x1.conv)
            x = self.conv1_1x1.bn(x)
        else:
            residual = _convolve(self.shortcut, x)
            x = self.conv1_1x1(x)
        for name in self.BRANCH[1:]:
            x = getattr(self, name)(x)
        block = self.conv3_1x1
        if takes(x, block.conv, block.bn):
            leaves = following is not None and following.takes_mask(x, block.conv.out_channels)
            return expand(x, block.conv, block.bn, residual, relu=True, masked=leaves), leaves
        return self.act(block(x) + residual), False

    def is_known(self) -> bool:
        """Whether the block does what its class says, and nobody looks at what enters or leaves it."""
        return type(self) in COMPILED.values() and self.training and not is_watched(self) and self._has_known_end()

    def takes_mask(self, like: Tensor, channels: int) -> bool:
        """Whether the block masks the gradient of its input, if that is the output of a ReLU and goes nowhere else.

        Args:
            like: (batch, any, height, width), of the input's pixels and dtype.
            channels: Of the input.
        """
        first = self.conv1_1x1
        return (
            self.is_known()
            and type(self.shortcut) is nn.Identity
            and not is_watched(self.shortcut)
            and _is_pointwise(first)
            and first.conv.stride == (1, 1)
            and entry.takes(like, channels, first.conv)
        )

    def _has_known_end(self) -> bool:
        """Whether nothing but a sum and a ReLU follows the last convolution and its norm, and nobody looks on."""
        nothing = [getattr(self, name) for name in self.AFTER]
        return (
            _is_expansion(self.conv3_1x1)
            and self.shortcut is not None
            and type(self.act) is nn.ReLU
            and all(type(module) is nn.Identity for module in nothing)
            and not any(is_watched(module) for module in (self.act, *nothing))
        )


class CompiledBottleneckBlock(_Block, BottleneckBlock):
    """The same as timm's, with the same state_dict; faster, and smaller in memory, when compiled for training."""

    BRANCH = ("conv1_1x1", "conv2_kxk", "conv2b_kxk", "attn")
    AFTER = ("attn_last", "drop_path")


class CompiledSelfAttnBlock(_Block, SelfAttnBlock):
    """The same as timm's, with the same state_dict; faster, and smaller in memory, when compiled for training."""

    BRANCH = ("conv1_1x1", "conv2_kxk", "self_attn", "post_attn")
    AFTER = ("drop_path",)


COMPILED: dict[type[nn.Module], type[nn.Module]] = {
    BottleneckBlock: CompiledBottleneckBlock,
    SelfAttnBlock: CompiledSelfAttnBlock,
}


class CompiledStage(nn.Sequential):
    """Residual blocks one after the other, each with the output of the one before, which nobody else gets."""

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the output of the last block."""
        if not (torch.compiler.is_compiling() and self.training):
            out: Tensor = super().forward(x)
            return out
        masks = False
        modules = list(self)
        for module, following in zip(modules, [*modules[1:], None], strict=True):
            if isinstance(module, _Block) and (masks or module.is_known()):  # who is left a mask must take it
                x, masks = module.forward_between(x, masks, following if isinstance(following, _Block) else None)
            else:
                x = module(x)
        return x


def convert_blocks(network: nn.Module) -> None:
    """Make all blocks of a network that are exactly timm's, and what holds them, blocks and stages of this module."""
    for module in network.modules():
        if type(module) in COMPILED:
            module.__class__ = COMPILED[type(module)]  # nothing that it holds is different
        elif type(module) is nn.Sequential and any(type(child) in COMPILED for child in module):
            module.__class__ = CompiledStage


def _convolve(block: nn.Module, x: Tensor) -> Tensor:
    """A shortcut: its convolution and norm as one where that is faster."""
    if _is_expansion(block):
        assert isinstance(block, ConvNormAct)
        seen, (height, width) = x, block.conv.stride
        if (height, width) != (1, 1):
            seen = x[:, :, ::height, ::width].contiguous(memory_format=torch.channels_last)
        if takes(seen, block.conv, block.bn):
            return expand(seen, block.conv, block.bn)
    out: Tensor = block(x)
    return out


def _is_expansion(block: nn.Module) -> bool:
    """Whether a layer is a 1x1 convolution and a batch norm, and nobody looks at one of them."""
    if not _is_pointwise(block):
        return False
    assert isinstance(block, ConvNormAct)
    norm = block.bn
    return (
        type(norm) is CompiledBatchNormAct2d
        and type(norm.act) is nn.Identity
        and type(norm.drop) is nn.Identity
        and not any(is_watched(module) for module in (norm, norm.act, norm.drop))
    )


def _is_pointwise(block: nn.Module) -> bool:
    """Whether a layer is a 1x1 convolution with something behind it, and nobody looks at what is between."""
    if type(block) is not ConvNormAct or block.aa is not None:
        return False
    convolution = block.conv
    return (
        type(convolution) is nn.Conv2d
        and convolution.kernel_size == (1, 1)
        and convolution.padding == (0, 0)
        and convolution.groups == 1
        and convolution.bias is None
        and not is_watched(block)
        and not is_watched(convolution)
    )
