"""A residual block around a GSA module as one operator, for few images: `gsanet::attention_block`.

All that it computes could be four operators. As one it knows which kernel is before which: behind its first one there
are kernels of this package only, and the weights of all others are older than that, so that each reads its own while
the one before it still runs (`docs/kernels.md`, "Launched early"). The shortcut's convolution is computed beside the
branch.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from gsanet.functional.convolution import fused_convolution_relu, fused_pointwise_convolution
from gsanet.functional.fused import calls
from gsanet.functional.fused.beside import start_beside
from gsanet.functional.fused.module_ops import infer
from gsanet.functional.fused.pointwise import convolve_few
from gsanet.functional.fused.prepared import prepared_operator
from gsanet.functional.inference_only import refuse_gradients

ONCE = (1, 1), (0, 0), (1, 1)  # stride, padding, dilation


def _attention_block(
    x: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    weight: Tensor,
    rel_column: Tensor,
    rel_row: Tensor,
    norm: Tensor,
    finish: Tensor | None,
    last_weight: Tensor,
    last_bias: Tensor,
    shortcut_weight: Tensor | None,
    shortcut_bias: Tensor | None,
    heads: int,
    dim_key: int,
    content: bool,
    stride: int,
) -> Tensor:
    """relu(convolution(attention(relu(convolution(x)))) + shortcut(x)), 16-bit scalars.

    Args:
        x: (batch, channels, height, width).
        first_weight: (channels of x of the module, channels, 1, 1).
        first_bias: The same channels.
        weight: Of the module, as all up to `finish` as for `gsanet::attention_map_inference`.
        rel_column: The same.
        rel_row: The same.
        norm: The same.
        finish: The same.
        last_weight: (channels out, channels of the module's output, 1, 1).
        last_bias: (channels out,).
        shortcut_weight: (channels out, channels, 1, 1); None: the shortcut is x itself.
        shortcut_bias: (channels out,), or None.
        heads: Number of heads.
        dim_key: Channels of q.
        content: Whether content attention is on.
        stride: Of the module, and of the shortcut's convolution.
    """
    # All copies that may have to be made are made before the first kernel of ours.
    x = x.contiguous(memory_format=torch.channels_last)
    tables = rel_column.contiguous(), rel_row.contiguous()

    def shortcut() -> Tensor:
        if shortcut_weight is None:
            return x
        out = convolve_few(x, shortcut_weight, shortcut_bias, relu=False, stride=(stride, stride))
        return fused_pointwise_convolution(x, shortcut_weight, shortcut_bias, (stride, stride)) if out is None else out

    residual, wait = start_beside(shortcut, x)
    inner = convolve_few(x, first_weight, first_bias, relu=True)
    ours = inner is not None
    if inner is None:
        inner = fused_convolution_relu(x, first_weight, first_bias, None, *ONCE)
    attended = infer(inner, weight, *tables, norm, finish, heads, dim_key, content, stride, early=ours)
    wait()
    out = convolve_few(attended, last_weight, last_bias, residual, relu=True, early_weight=True)
    return fused_convolution_relu(attended, last_weight, last_bias, residual, *ONCE) if out is None else out


def _prepare(*arguments: Any) -> None:
    shapes = tuple(tuple(tensor.shape) if isinstance(tensor, Tensor) else None for tensor in arguments[:-4])
    _compile_ahead(arguments[0].device, arguments[0].dtype, shapes, arguments[-4:])


@functools.cache
def _compile_ahead(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...] | None, ...],
    settings: tuple[int, int, bool, int],
) -> None:
    """Compile all kernels of a block at once when it is first met; `shapes` are those of its tensors."""
    if device.type != "cuda":
        return
    x, *others = (None if shape is None else torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    assert x is not None
    block: Any = _attention_block
    tensors = [x.to(memory_format=torch.channels_last), *others]
    calls.compile_ahead(device, lambda: block(*tensors, *settings))


attention_block = prepared_operator("gsanet::attention_block", _attention_block, _prepare)


@attention_block.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    last_weight, stride = others[7], others[-1]
    batch, _, height, width = x.shape
    return x.new_empty(batch, height // stride, width // stride, last_weight.shape[0]).permute(0, 3, 1, 2)


refuse_gradients(attention_block)
