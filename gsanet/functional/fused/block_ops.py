"""Residual blocks around GSA modules, one behind the other, as one operator for few images: `gsanet::attention_blocks`.

All that it computes could be four operators for each block. As one it knows which kernel is before which: all weights
and tables are older than its first kernel, and where that is one of this package, all others read theirs while the
kernels before them still run (`docs/kernels.md`, "Launched early"). The shortcuts' convolutions are computed beside the
branches.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gsanet.functional.convolution import fused_convolution_relu, fused_pointwise_convolution
from gsanet.functional.fused import calls
from gsanet.functional.fused.beside import Beside
from gsanet.functional.fused.module_ops import infer
from gsanet.functional.fused.pointwise import convolve_few
from gsanet.functional.fused.prepared import prepared_operator
from gsanet.functional.inference_only import refuse_gradients

ONCE = (1, 1), (0, 0), (1, 1)  # stride, padding, dilation
SETTINGS = 6  # numbers of a block: the last fields, and whether there are `finish`, the shortcut's weight and its bias


class Block(NamedTuple):
    """relu(convolution(attention(relu(convolution(x)))) + shortcut(x)).

    Args:
        first_weight: Of the convolution before attention, (channels of the module, channels, 1, 1).
        first_bias: Its bias.
        weight: Of the module, and up to `finish` the same as for `gsanet::attention_map_inference`.
        rel_column: The same.
        rel_row: The same.
        norm: The same.
        last_weight: Of the convolution behind attention, (channels out, channels of the module's output, 1, 1).
        last_bias: Its bias.
        finish: As for `gsanet::attention_map_inference`.
        shortcut_weight: (channels out, channels, 1, 1); None: the shortcut is x itself.
        shortcut_bias: Its bias, or None.
        heads: Number of heads.
        dim_key: Channels of q.
        content: Whether content attention is on.
        stride: Of the module, and of the shortcut's convolution.
    """

    first_weight: Tensor
    first_bias: Tensor
    weight: Tensor
    rel_column: Tensor
    rel_row: Tensor
    norm: Tensor
    last_weight: Tensor
    last_bias: Tensor
    finish: Tensor | None
    shortcut_weight: Tensor | None
    shortcut_bias: Tensor | None
    heads: int
    dim_key: int
    content: bool
    stride: int

    def packed(self) -> tuple[list[Tensor], list[int]]:
        """As an operator takes it: the tensors that there are, and numbers."""
        there = [tensor is not None for tensor in self[8:11]]
        tensors = [tensor for tensor in self[:11] if isinstance(tensor, Tensor)]
        # The shortcut has no bias without a weight.
        return tensors, [self.heads, self.dim_key, int(self.content), self.stride, int(there[0]), sum(there[1:])]


def _unpacked(tensors: Sequence[Tensor], settings: Sequence[int]) -> Iterator[Block]:
    left = iter(tensors)
    for i in range(0, len(settings), SETTINGS):
        heads, dim_key, content, stride, finish, shortcut = settings[i : i + SETTINGS]
        first_weight, first_bias, weight, column, row, norm, last_weight, last_bias = (next(left) for _ in range(8))
        others = (next(left) if there else None for there in (finish, shortcut > 0, shortcut > 1))
        end, shortcut_weight, shortcut_bias = others
        yield Block(
            first_weight, first_bias, weight, column, row, norm, last_weight, last_bias,
            end, shortcut_weight, shortcut_bias, heads, dim_key, bool(content), stride,
        )  # fmt: skip


def _attention_blocks(x: Tensor, tensors: Sequence[Tensor], settings: Sequence[int]) -> Tensor:
    """All blocks, of (batch, channels, height, width) in 16 bits; `Block.packed` makes tensors and settings of one."""
    # All copies that may have to be made are made before the first kernel of ours.
    x = x.contiguous(memory_format=torch.channels_last)
    blocks = [
        block._replace(rel_column=block.rel_column.contiguous(), rel_row=block.rel_row.contiguous())
        for block in _unpacked(tensors, settings)
    ]
    early = False  # whether a kernel of ours has begun, so that all that is older than the operator is there
    for block in blocks:
        x, early = _run(block, x, early), True  # that of the rows was one
    return x


def _run(block: Block, x: Tensor, early: bool) -> Tensor:
    """One block; `early`: behind a kernel of ours of the same operator."""
    # The branch's convolution is launched first, as all others wait for it; the shortcut's does not.
    beside = None if block.shortcut_weight is None else Beside(x)
    first, last = (block.first_weight, block.first_bias), (block.last_weight, block.last_bias)
    inner = convolve_few(x, *first, relu=True, early_weight=early)
    by_kernel = inner is not None
    if inner is None:
        inner = fused_convolution_relu(x, *first, None, *ONCE)
    residual = x if beside is None else beside.run(lambda: _shortcut(block, x, early))
    tables, norms = (block.rel_column, block.rel_row), (block.norm, block.finish)
    settings = block.heads, block.dim_key, block.content, block.stride
    attended = infer(inner, block.weight, tables, norms, settings, early=early or by_kernel)
    if beside is not None:
        beside.wait()
    out = convolve_few(attended, *last, residual, relu=True, early_weight=True)
    return fused_convolution_relu(attended, *last, residual, *ONCE) if out is None else out


def _shortcut(block: Block, x: Tensor, early: bool) -> Tensor:
    assert block.shortcut_weight is not None
    convolution, stride = (block.shortcut_weight, block.shortcut_bias), (block.stride, block.stride)
    out = convolve_few(x, *convolution, relu=False, stride=stride, early_weight=early)
    return fused_pointwise_convolution(x, *convolution, stride) if out is None else out


def _prepare(x: Tensor, tensors: Sequence[Tensor], settings: Sequence[int]) -> None:
    shapes = tuple(tuple(tensor.shape) for tensor in (x, *tensors))
    _compile_ahead(x.device, x.dtype, shapes, tuple(settings))


@functools.cache
def _compile_ahead(
    device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], settings: tuple[int, ...]
) -> None:
    """Compile all kernels of some blocks at once when they are first met; `shapes` are those of x and the tensors."""
    if device.type == "cuda":
        x, *tensors = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        x = x.to(memory_format=torch.channels_last)
        calls.compile_ahead(device, lambda: _attention_blocks(x, tensors, settings))


attention_blocks = prepared_operator("gsanet::attention_blocks", _attention_blocks, _prepare)


@attention_blocks.register_fake
def _(x: Tensor, tensors: Sequence[Tensor], settings: Sequence[int]) -> Tensor:
    batch, channels, height, width = x.shape
    for block in _unpacked(tensors, settings):
        channels, height, width = block.last_weight.shape[0], height // block.stride, width // block.stride
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


refuse_gradients(attention_blocks)
