"""timm's residual blocks; where `torch.compile` trains on a GPU their last convolution, norm, sum and ReLU are one."""

from typing import Any, ClassVar

import torch
from timm.layers import ConvNormAct
from timm.models.byobnet import BottleneckBlock, SelfAttnBlock
from torch import Tensor, nn

from gsanet.functional.fused.expansion import expand, takes
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.watched import is_watched

__all__ = ["CompiledBottleneckBlock", "CompiledSelfAttnBlock", "convert_blocks"]


class _Block(nn.Module):
    """What both kinds of blocks share: relu(after(conv3_1x1(branch(x))) + shortcut(x))."""

    BRANCH: ClassVar[tuple[str, ...]]
    AFTER: ClassVar[tuple[str, ...]]
    conv3_1x1: Any
    shortcut: Any
    act: Any

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the block's output."""
        if not (torch.compiler.is_compiling() and self.training and self._has_known_end()):
            out: Tensor = super().forward(x)
            return out
        residual = _convolve(self.shortcut, x)
        for name in self.BRANCH:
            x = getattr(self, name)(x)
        block = self.conv3_1x1
        if takes(x, block.conv, block.bn):
            return expand(x, block.conv, block.bn, residual, relu=True)
        out = self.act(block(x) + residual)
        return out

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


def convert_blocks(network: nn.Module) -> None:
    """Make all blocks of a network that are exactly timm's blocks of this module, in place."""
    for module in network.modules():
        if type(module) in COMPILED:
            module.__class__ = COMPILED[type(module)]  # nothing that it holds is different


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
    if type(block) is not ConvNormAct or block.aa is not None:
        return False
    convolution, norm = block.conv, block.bn
    return (
        type(convolution) is nn.Conv2d
        and convolution.kernel_size == (1, 1)
        and convolution.padding == (0, 0)
        and convolution.groups == 1
        and convolution.bias is None
        and type(norm) is CompiledBatchNormAct2d
        and type(norm.act) is nn.Identity
        and type(norm.drop) is nn.Identity
        and not any(is_watched(module) for module in (block, convolution, norm, norm.act, norm.drop))
    )
