"""The backend `torch`: the same equations in lean, pure PyTorch, for any device, for export, and as the fallback.

What makes it lean: the position embeddings are windows of one small table and never a one-hot product; one score
tensor (batch, x, y, head, length) exists at a time, in the backward pass too, because it is computed again there
instead of being kept.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsanet.functional.backends import Axis, Backend


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear in the pixels: the context vectors come first, and no pair of pixels is ever formed."""
    # A weight is about 1 / pixels, which leaves float16's normal range on large maps: there they stay in float32.
    weight_dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    weights = k.flatten(1, 2).softmax(dim=1, dtype=weight_dtype)  # b, xy, n, k
    context = torch.einsum("bpnk,bpnv->bnkv", weights, v.flatten(1, 2).to(weight_dtype)).to(q.dtype)
    return torch.einsum("bxynk,bnkv->bxynv", q, context)


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None) -> Tensor:
    """Both axes by one formulation along dimension 1; for a row the map is seen transposed, without a copy."""
    if axis == "row":
        return positional_attention(q.transpose(1, 2), v.transpose(1, 2), rel, "column", reach).transpose(1, 2)
    length = q.shape[1]
    table = fit_table(rel, length, reach)
    embeddings = table.unfold(0, length, 1).flip(0)  # x, k, i: at x the window of rows that starts at length - 1 - x
    return _ColumnAttention.apply(q, v, embeddings)


def fit_table(rel: Tensor, length: int, reach: int | None) -> Tensor:
    """The (2 * length - 1, k) table for a line: the middle of a longer one, zeros around a shorter one or the reach."""
    middle, wanted = rel.shape[0] // 2, length - 1
    kept = min(middle, wanted) if reach is None else min(middle, wanted, reach)
    rel = rel[middle - kept : middle + kept + 1]
    return F.pad(rel, (0, 0, wanted - kept, wanted - kept)) if kept < wanted else rel


class _ColumnAttention(torch.autograd.Function):
    """Y = S V with S = Q P, keeping Q, V and P for the backward pass but not S.

    The pairs m of a line and a head, (batch, y, head), are independent. A product for each x leaves S as (x, m, i); the
    next one, for each m, reads it as (m, x, i) through its strides, and so on: scores are never copied.
    """

    @staticmethod
    def forward(q: Tensor, v: Tensor, p: Tensor) -> Tensor:
        scores = torch.bmm(_by_pixel(q), p)  # x, m, i
        return _to_map(torch.bmm(scores.transpose(0, 1), _by_line(v)), v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        q, v, p = ctx.saved_tensors
        need_q, need_v, need_p = ctx.needs_input_grad
        dq = dv = dp = None
        q_x, dy_m = _by_pixel(q), _by_line(dy)
        if need_v:
            dv = _to_map(torch.bmm(torch.bmm(q_x, p).permute(1, 2, 0), dy_m), v)
        if need_q or need_p:
            ds = torch.bmm(dy_m, _by_line(v).transpose(1, 2)).transpose(0, 1)  # x, m, i
            if need_q:
                dq = _to_map(torch.bmm(ds, p.transpose(1, 2)).transpose(0, 1), q)
            if need_p:
                dp = torch.bmm(q_x.transpose(1, 2), ds)
        return dq, dv, dp


def _by_pixel(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 3)  # x, m, channel


def _by_line(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1, 4).flatten(0, 2)  # m, x, channel


def _to_map(lines: Tensor, like: Tensor) -> Tensor:
    batch, _, width, heads, _ = like.shape
    return lines.unflatten(0, (batch, width, heads)).permute(0, 3, 1, 2, 4)  # batch, x, y, head, channel


BACKEND = Backend("torch", content_attention, positional_attention)
