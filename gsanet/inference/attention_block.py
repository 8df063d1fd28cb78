"""Residual blocks around a GSA module, which for few images are one operator on a GPU."""

from typing import NamedTuple

from torch import Tensor, nn

from gsanet.functional.convolution import is_for_operators
from gsanet.functional.fused.beside import FEW
from gsanet.functional.fused.block_ops import attention_block
from gsanet.inference.attention import InferenceSelfAttention
from gsanet.inference.blocks import (
    SEQUENCES,
    ConvolutionReLU,
    InferenceBlock,
    PointwiseConvolution,
    does_nothing,
    is_pointwise,
)
from gsanet.layers.watched import is_watched

__all__ = ["AttentionBlock", "fuse_attention_blocks"]


class Layers(NamedTuple):
    """What such a block consists of; without a convolution the shortcut is the block's input."""

    first: ConvolutionReLU
    attention: InferenceSelfAttention
    last: ConvolutionReLU
    shortcut: PointwiseConvolution | None


class AttentionBlock(InferenceBlock):
    """A residual block of a 1x1 convolution, a GSA module and another 1x1 convolution. Made by `fuse_for_inference`.

    Args:
        block: The block, with all that it holds.
    """

    def __init__(self, block: InferenceBlock):
        nn.Module.__init__(self)
        vars(self).update(vars(block))

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the block's output."""
        # torch.fx calls with what is no tensor, and follows the layers.
        out = self._in_one(x) if isinstance(x, Tensor) else None
        return super().forward(x) if out is None else out

    def _in_one(self, x: Tensor) -> Tensor | None:
        """The output by one operator, if its kernels take all of the block."""
        layers = layers_of(self)
        if layers is None:
            return None
        first, attention, last, shortcut = layers
        weights = [first.weight, first.bias, attention.weight, last.weight, last.bias]
        if shortcut is not None:
            weights += [shortcut.weight] if shortcut.bias is None else [shortcut.weight, shortcut.bias]
        given = [tensor for tensor in weights if tensor is not None]
        if not is_for_operators(x, *given) or not 1 <= x.shape[0] <= FEW or x.shape[1] != first.in_channels:
            return None
        inner = x[:, :1].expand(-1, attention.dim, -1, -1)  # of the shape of what the module gets
        operands = attention.operands(inner)
        if operands is None or any(table.dtype != x.dtype for table in operands[1:3]):
            return None
        assert first.bias is not None
        assert last.bias is not None
        return attention_block(
            x, first.weight, first.bias, *operands, last.weight, last.bias,
            None if shortcut is None else shortcut.weight, None if shortcut is None else shortcut.bias,
            attention.num_heads, attention.dim_key, attention.content, attention.stride,
        )  # fmt: skip


def layers_of(block: InferenceBlock) -> Layers | None:
    """The layers of a block that can be one operator, and that nobody looks at; None for other blocks."""
    branch, last_name, shortcut_name = block.names
    found = [_only_layer(getattr(block, name)) for name in branch if not does_nothing(getattr(block, name))]
    last, shortcut = block.get_submodule(last_name), getattr(block, shortcut_name)
    first, attention = found if len(found) == 2 else (None, None)
    if not (type(first) is ConvolutionReLU and type(attention) is InferenceSelfAttention) or is_watched(last):
        return None
    if not (type(last) is ConvolutionReLU and is_pointwise(first) and is_pointwise(last) and first.stride == (1, 1)):
        return None
    if last.stride != (1, 1) or first.out_channels != attention.dim or attention.dim_out != last.in_channels:
        return None
    if shortcut is None or does_nothing(shortcut):
        return Layers(first, attention, last, None) if attention.stride == 1 else None
    convolution = _only_layer(shortcut)
    if type(convolution) is not PointwiseConvolution or convolution.stride != (attention.stride, attention.stride):
        return None
    return Layers(first, attention, last, convolution)


def _only_layer(module: nn.Module) -> nn.Module | None:
    """The one layer of nested modules that does something, if nobody looks at them."""
    while not is_watched(module):
        if type(module) not in SEQUENCES:
            return module
        working = [child for child in module.children() if not does_nothing(child)]
        if len(working) != 1:
            return None
        (module,) = working
    return None


def fuse_attention_blocks(root: nn.Module) -> None:
    """Replace each block of a fused network that can be one operator."""
    made: dict[nn.Module, AttentionBlock] = {}
    for name, module in list(root.named_modules(remove_duplicate=False)):
        if type(module) is InferenceBlock and layers_of(module) is not None:
            root.set_submodule(name, made.setdefault(module, AttentionBlock(module)))
