"""The whole module in evaluation: one kernel, and PyTorch's pooling."""

import torch
from torch import Tensor, nn

from gsanet.functional.attention import to_feature_map
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
    dim_out = len(weight) - dim_key * (2 if content else 1)
    column, row = (
        None if rel is None else fit_table(rel, length, reach).contiguous()
        for rel, length in ((rel_column, height), (rel_row, width))
    )
    # Lines are columns, and rows lie across them. A single axis is the one across: content attention comes with it.
    one_axis = column is None or row is None
    along, across = (None, column if row is None else row) if one_axis else (column, row)
    between = None if one_axis or norm is None else _fixed(norm)
    afterwards = None if finish is None or stride > 1 else _fixed(finish)
    weight = weight.contiguous()

    def attend(images: Tensor, target: Tensor) -> None:
        columns = row is not None
        calls.attend_as_module(images, target, columns, weight, along, across, content, between, afterwards)

    out = x.new_empty(batch, -(-height // stride), -(-width // stride), num_heads, dim_out // num_heads)
    if stride == 1:
        attend(x, out)
        return to_feature_map(out)
    at_once = min(batch, max(1, PIECE // (height * width * dim_out)))
    before_pooling = x.new_empty(at_once, height, width, *out.shape[3:])
    for images, target in zip(x.split(at_once), out.split(at_once), strict=True):
        attended = before_pooling[: len(images)]
        attend(images, attended)
        _pool(attended, stride, finish, target)
    return to_feature_map(out)


def _fixed(norm: Norm | Tensor) -> calls.FixedNorm:
    if isinstance(norm, Tensor):
        scale, shift = norm.contiguous()
        return calls.FixedNorm(scale, shift)
    assert isinstance(norm, nn.BatchNorm2d)
    scale, shift, mean, variance = (
        None if one is None else one.contiguous()
        for one in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    return calls.FixedNorm(scale, shift, mean, variance, norm.eps)


def _pool(attended: Tensor, stride: int, finish: Tensor | None, out: Tensor) -> None:
    """Average a map (batch, x, y, head, channel) into one that is smaller by the stride, and scale, shift and ReLU."""
    pooled = average_pool(to_feature_map(attended), stride).permute(0, 2, 3, 1)
    if finish is None:
        out.flatten(3).copy_(pooled)
    else:
        torch.addcmul(finish[1], pooled, finish[0], out=out.flatten(3)).relu_()
