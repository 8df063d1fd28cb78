"""The whole module in evaluation: one kernel, and PyTorch's pooling."""

import torch
from torch import Tensor, nn

from gsanet.functional.backends import Norm
from gsanet.functional.lean import fit_table
from gsanet.functional.native import calls
from gsanet.functional.pooling import average_pool

PIECE = 2**20  # numbers of the output before pooling that are made at a time


def attention_map(
    x: Tensor,
    weight: Tensor,
    rel_column: Tensor | None,
    rel_row: Tensor | None,
    norm: Norm | Tensor | None,
    *,
    finish: Tensor | None = None,
    num_heads: int,
    dim_key: int,
    content: bool,
    reach: int | None,
    stride: int,
) -> Tensor:
    """As `gsanet.functional.global_self_attention_map`; the norm is one in evaluation, or its scale and shift."""
    batch, _, height, width = x.shape
    dim_out = weight.shape[0] - dim_key * (2 if content else 1)
    column = None if rel_column is None else _table_of_line(rel_column, height, reach)
    row = None if rel_row is None else _table_of_line(rel_row, width, reach)
    # Lines are columns, and rows lie across them. A single axis is the one across: content attention comes with it.
    one_axis = column is None or row is None
    along, across = (None, column if row is None else row) if one_axis else (column, row)
    between = None if one_axis or norm is None else _fixed(norm)
    afterwards = None if finish is None or stride > 1 else _fixed(finish)
    operands = (num_heads, row is not None, weight.contiguous(), along, across, content, between, afterwards)
    out = _empty_map(x, batch, dim_out, -(-height // stride), -(-width // stride))
    if stride == 1:
        calls.attend_as_module(x, out, *operands)
        return out
    at_once = min(batch, max(1, PIECE // (height * width * dim_out)))
    before_pooling = _empty_map(x, at_once, dim_out, height, width)
    for images, target in zip(x.split(at_once), out.split(at_once), strict=True):
        attended = before_pooling[: len(images)]
        calls.attend_as_module(images, attended, *operands)
        _pool(attended, stride, finish, target)
    return out


def tensors_of(norm: nn.BatchNorm2d) -> tuple[Tensor | None, ...]:
    """Scale, shift, mean and variance, as `calls.FixedNorm` has them."""
    return norm.weight, norm.bias, norm.running_mean, norm.running_var


def _fixed(norm: Norm | Tensor) -> calls.FixedNorm:
    if isinstance(norm, Tensor):
        scale, shift = calls.as_floats(norm)
        return calls.FixedNorm(scale, shift)
    assert isinstance(norm, nn.BatchNorm2d)
    scale, shift, mean, variance = [None if one is None else calls.as_floats(one) for one in tensors_of(norm)]
    return calls.FixedNorm(scale, shift, mean, variance, norm.eps)


def _table_of_line(rel: Tensor, length: int, reach: int | None) -> Tensor:
    """As `fit_table`, as kernels take it; most tables are what a line needs already."""
    fits = rel.shape[0] == 2 * length - 1 and (reach is None or reach >= length - 1)
    return calls.as_floats(rel if fits else fit_table(rel, length, reach))


def _empty_map(like: Tensor, *shape: int) -> Tensor:
    """Memory for a map (batch, channel, x, y), channels-last."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _pool(attended: Tensor, stride: int, finish: Tensor | None, out: Tensor) -> None:
    """Average a map (batch, channel, x, y) into one that is smaller by the stride, and scale, shift and ReLU."""
    pooled = average_pool(attended, stride)
    if finish is None:
        out.copy_(pooled)
    else:
        scale, shift = finish[:, :, None, None]
        torch.addcmul(shift, pooled, scale, out=out).relu_()
