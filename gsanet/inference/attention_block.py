"""Residual blocks around GSA modules, which for few images on a GPU are one operator, as many as follow each other."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gsanet.functional.convolution import is_for_operators
from gsanet.functional.fused import pointwise
from gsanet.functional.fused.beside import FEW
from gsanet.functional.fused.block_ops import Block, attention_blocks
from gsanet.inference.attention import InferenceSelfAttention
from gsanet.inference.blocks import (
    SEQUENCES,
    ConvolutionReLU,
    InferenceBlock,
    PointwiseConvolution,
    does_nothing,
    is_pointwise,
)
from gsanet.layers.residual_block import CompiledStage
from gsanet.layers.watched import is_watched

__all__ = ["AttentionBlock", "AttentionBlocks", "fuse_attention_blocks"]


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
        out = _in_one(x, [self]) if _is_for_one(x) else None
        return super().forward(x) if out is None else out


class AttentionBlocks(nn.Sequential):
    """`AttentionBlock`s, or sequences of them, one behind the other. Made by `fuse_for_inference`."""

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the last block's output."""
        blocks = _blocks_of(self) if _is_for_one(x) else None
        out = None if blocks is None else _in_one(x, blocks)
        return super().forward(x) if out is None else out


def _is_for_one(x: Tensor) -> bool:
    """Whether blocks of a map may be one operator: asked first, before anyone looks at the blocks."""
    # torch.fx calls with what is no tensor, and follows the layers.
    return pointwise.wanted and isinstance(x, Tensor) and is_for_operators(x) and 1 <= x.shape[0] <= FEW


def _blocks_of(sequence: AttentionBlocks) -> list[AttentionBlock] | None:
    """All blocks in order, if nobody looks at any of them."""
    blocks: list[AttentionBlock] = []
    for child in sequence:
        if is_watched(child):
            return None
        if type(child) is AttentionBlock:
            blocks.append(child)
            continue
        inner = _blocks_of(child) if type(child) is AttentionBlocks else None
        if inner is None:
            return None
        blocks += inner
    return blocks


def _in_one(x: Tensor, blocks: Sequence[AttentionBlock]) -> Tensor | None:
    """The output of blocks by one operator, if there are any and its kernels take all of them."""
    if not blocks:
        return None
    tensors: list[Tensor] = []
    settings: list[int] = []
    like = x  # of the shape of what a block gets
    for block in blocks:
        layers = layers_of(block)
        found = None if layers is None else _operands(like, layers)
        if found is None:
            return None
        more_tensors, more_settings = found.packed()
        tensors += more_tensors
        settings += more_settings
        height, width = like.shape[2] // found.stride, like.shape[3] // found.stride
        like = like[:, :1, :height, :width].expand(-1, found.last_weight.shape[0], -1, -1)
    return attention_blocks(x, tensors, settings)


class Layers(NamedTuple):
    """What such a block consists of; without a convolution the shortcut is the block's input."""

    first: ConvolutionReLU
    attention: InferenceSelfAttention
    last: ConvolutionReLU
    shortcut: PointwiseConvolution | None


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


def _operands(x: Tensor, layers: Layers) -> Block | None:
    """What the operator takes of a block, if its kernels take a map like x."""
    first, attention, last, shortcut = layers
    assert first.bias is not None
    assert last.bias is not None
    shortcut_weight, shortcut_bias = (None, None) if shortcut is None else (shortcut.weight, shortcut.bias)
    weights = first.weight, first.bias, attention.weight, last.weight, last.bias, shortcut_weight, shortcut_bias
    if x.shape[1] != first.in_channels or not is_for_operators(x, *(one for one in weights if one is not None)):
        return None
    operands = attention.operands(x[:, :1].expand(-1, attention.dim, -1, -1))
    if operands is None or not is_for_operators(x, *operands[1:3]):
        return None
    weight, column, row, norm, finish = operands
    return Block(
        first.weight, first.bias, weight, column, row, norm, last.weight, last.bias,
        finish, shortcut_weight, shortcut_bias,
        attention.num_heads, attention.dim_key, attention.content, attention.stride,
    )  # fmt: skip


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
    """Replace each block of a fused network that can be one operator, and the sequences of nothing but such blocks."""
    made: dict[nn.Module, nn.Module] = {}
    # From the inside to the outside: those that hold others come before these.
    for name, module in reversed(list(root.named_modules(remove_duplicate=False))):
        if type(module) is InferenceBlock and layers_of(module) is not None:
            root.set_submodule(name, made.setdefault(module, AttentionBlock(module)))
        elif type(module) in (nn.Sequential, CompiledStage) and name and _holds_only_blocks(module):
            root.set_submodule(name, made.setdefault(module, _as_blocks(module)))


def _holds_only_blocks(sequence: nn.Sequential) -> bool:
    kinds = AttentionBlock, AttentionBlocks
    return len(sequence) > 0 and all(type(child) in kinds for child in sequence) and "forward" not in vars(sequence)


def _as_blocks(sequence: nn.Sequential) -> AttentionBlocks:
    """The same with all that it holds."""
    made = AttentionBlocks()
    vars(made).update(vars(sequence))
    return made
