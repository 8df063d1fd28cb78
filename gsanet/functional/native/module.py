"""The whole module: a few images at a time, so that what lies between its steps stays in the cache."""

import torch
from torch import Tensor, nn

from gsanet.functional.attention import split_heads, to_feature_map
from gsanet.functional.backends import Axis, Norm
from gsanet.functional.fused.norms import applied_in_evaluation
from gsanet.functional.lean import fit_table
from gsanet.functional.native import calls
from gsanet.functional.pooling import average_pool

PIECE = 2**21  # numbers of q, k and v together that are made at a time


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
    batch, channels, height, width = x.shape
    dim_out = len(weight) - dim_key * (2 if content else 1)
    column, row = (
        None if rel is None else fit_table(rel, length, reach).contiguous()
        for rel, length in ((rel_column, height), (rel_row, width))
    )
    between = None
    if column is not None and row is not None and norm is not None:
        assert isinstance(norm, Tensor | nn.BatchNorm2d)
        between = norm.contiguous() if isinstance(norm, Tensor) else applied_in_evaluation(norm)[:2]
    finish = None if finish is None else finish.contiguous()

    at_once = min(batch, max(1, PIECE // (height * width * len(weight))))
    projected = x.new_empty(at_once, height, width, len(weight))
    columns = x.new_empty(at_once, height, width, num_heads, dim_out // num_heads)
    before_pooling = columns.new_empty(columns.shape) if stride > 1 else None
    out = x.new_empty(batch, -(-height // stride), -(-width // stride), *columns.shape[3:])
    for first in range(0, batch, at_once):
        images, target = (one[first : first + at_once] for one in (x.permute(0, 2, 3, 1), out))
        count = len(images)
        torch.mm(images.reshape(-1, channels), weight.T, out=projected[:count].view(-1, len(weight)))
        q, k, v = split_heads(projected[:count], num_heads, dim_key, content)
        context = None if k is None else calls.context_vectors(k, v)
        if column is not None and row is not None:
            v = calls.attend(q, v, column, "column", columns[:count], scale_and_shift=between)
        last: tuple[Tensor | None, Axis] = (row, "row") if column is None or row is not None else (column, "column")
        if before_pooling is None:
            calls.attend(q, v, *last, target, context=context, scale_and_shift=finish, relu=finish is not None)
        else:
            calls.attend(q, v, *last, before_pooling[:count], context=context)
            _pool(before_pooling[:count], stride, finish, target)
    return to_feature_map(out)


def _pool(attended: Tensor, stride: int, finish: Tensor | None, out: Tensor) -> None:
    """Average a map (batch, x, y, head, channel) into one that is smaller by the stride, and scale, shift and ReLU."""
    pooled = average_pool(to_feature_map(attended), stride).permute(0, 2, 3, 1)
    if finish is None:
        out.flatten(3).copy_(pooled)
    else:
        torch.addcmul(finish[1], pooled, finish[0], out=out.flatten(3)).relu_()
