"""The whole module: a few images at a time, so that what lies between its steps stays in the cache."""

import torch
from torch import Tensor, nn

from gsanet.functional.attention import to_feature_map
from gsanet.functional.backends import Norm
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
    batch, _, height, width = x.shape
    weight = weight.contiguous()
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

    # Lines are columns, and rows lie across them. A single axis is the one across, for which content attention waits.
    along, across = (column, row) if row is not None else (None, column)
    column_is_last = row is None
    pieces = -(-batch * height * width * len(weight) // PIECE)
    at_once = -(-batch // max(1, pieces))

    heads = num_heads, dim_out // num_heads
    out = x.new_empty(batch, -(-height // stride), -(-width // stride), *heads)
    before_pooling = x.new_empty(at_once, height, width, *heads) if stride > 1 else None
    for first in range(0, batch, max(1, at_once)):
        images, target = (one[first : first + at_once] for one in (x.permute(0, 2, 3, 1), out))
        attended = target if before_pooling is None else before_pooling[: len(images)]
        lines, attended_lines = (one if column_is_last else one.transpose(1, 2) for one in (images, attended))
        calls.attend_as_module(
            lines, weight, along, across, content, attended_lines,
            between=between, finish=finish if before_pooling is None else None,
        )  # fmt: skip
        if before_pooling is not None:
            _pool(attended, stride, finish, target)
    return to_feature_map(out)


def _pool(attended: Tensor, stride: int, finish: Tensor | None, out: Tensor) -> None:
    """Average a map (batch, x, y, head, channel) into one that is smaller by the stride, and scale, shift and ReLU."""
    pooled = average_pool(to_feature_map(attended), stride).permute(0, 2, 3, 1)
    if finish is None:
        out.flatten(3).copy_(pooled)
    else:
        torch.addcmul(finish[1], pooled, finish[0], out=out.flatten(3)).relu_()
