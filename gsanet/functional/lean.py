"""The backend `torch`: the same equations in lean, pure PyTorch, for any device, for export, and as the fallback.

What makes it lean: the position embeddings are windows of one small table and never a one-hot product; one score
tensor (batch, x, y, head, length) exists at a time, in the backward pass too, because it is computed again there
instead of being kept. On a CPU it is cut into pieces that stay in the cache.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gsanet.functional.backends import Axis, Backend
from gsanet.functional.transforms import is_transformed

# For CPUs, measured on two cores: benchmarks/NOTES.md has the numbers.
LARGE_IMAGE = 2**17  # elements of q from which on content attention goes image by image
MANY_SCORES = 3 * 2**18  # scores of positional attention above which it goes piece by piece
NARROW = 16  # columns below which a product is turned


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear in the pixels: the context vectors come first, and no pair of pixels is ever formed."""
    if _may_loop(q) and q.shape[0] > 0 and q[0].numel() >= LARGE_IMAGE:
        images = zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
        return torch.stack([_content_of_image(*image) for image in images])
    weights = _weights(k.flatten(1, 2), dim=1)  # b, xy, n, k
    context = torch.einsum("bpnk,bpnv->bnkv", weights, v.flatten(1, 2).to(weights.dtype)).to(q.dtype)
    return torch.einsum("bxynk,bnkv->bxynv", q, context)


def _content_of_image(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for (x, y, n, k): without a batch, heads and pixels are strides of a product, and nothing is copied."""
    weights = _weights(k.flatten(0, 1), dim=0)  # xy, n, k
    context = _contexts(weights, v.flatten(0, 1).to(weights.dtype)).to(q.dtype)
    out = _product(q.flatten(0, 1).transpose(0, 1), context)  # n, xy, v
    return out.transpose(0, 1).unflatten(0, q.shape[:2])


def _contexts(weights: Tensor, values: Tensor) -> Tensor:
    """(n, k, v) from (xy, n, k) and (xy, n, v).

    Narrow heads are taken several at a time, and what lies between two different heads is thrown away: one product that
    is wide enough to be fast costs less than the narrow ones.
    """
    heads, width = weights.shape[1:]
    together = math.gcd(heads, max(1, NARROW // width))
    weights, values = (x.unflatten(1, (-1, together)).flatten(2) for x in (weights, values))
    blocks = torch.bmm(weights.permute(1, 2, 0), values.transpose(0, 1))
    blocks = blocks.unflatten(2, (together, -1)).unflatten(1, (together, -1))  # several heads, head, k, head, v
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)


def _weights(k: Tensor, dim: int) -> Tensor:
    # A weight is about 1 / pixels, which leaves float16's normal range on large maps: there they stay in float32.
    return k.softmax(dim=dim, dtype=torch.float32 if k.dtype == torch.float16 else k.dtype)


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None) -> Tensor:
    """Both axes by one formulation along dimension 1; for a row the map is seen transposed, without a copy."""
    if axis == "row":
        return positional_attention(q.transpose(1, 2), v.transpose(1, 2), rel, "column", reach).transpose(1, 2)
    windows = _windows(fit_table(rel, q.shape[1], reach))
    # torch.func has its own rules for products, forwards, backwards and over batches, but keeps the scores.
    return _mix(q, v, windows) if is_transformed() else _ColumnAttention.apply(q, v, windows)


def _windows(table: Tensor) -> Tensor:
    """(x, k, i) from the (2 * length - 1, k) table of a line: at x the rows from length - 1 - x on."""
    return table.unfold(0, len(table) // 2 + 1, 1).flip(0)


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
        pieces = _pieces(q)
        if not pieces:
            return _mix(q, v, p)
        out = torch.empty_like(v)
        for piece in pieces:
            out[piece] = _mix(q[piece], v[piece], p)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, v, p = ctx.saved_tensors
        needs = ctx.needs_input_grad
        pieces = _pieces(q)
        if not pieces:
            return _mix_gradient(q, v, p, dy, needs)
        by_pixel = [torch.empty_like(x) if need else None for x, need in zip((q, v), needs[:2], strict=True)]
        dp = torch.zeros_like(p) if needs[2] else None
        for piece in pieces:
            *grads, dp_piece = _mix_gradient(q[piece], v[piece], p, dy[piece], needs)
            for whole, grad in zip(by_pixel, grads, strict=True):
                if whole is not None:
                    whole[piece] = grad
            if dp is not None:
                dp += dp_piece
        return *by_pixel, dp


def _mix(q: Tensor, v: Tensor, p: Tensor) -> Tensor:
    scores = torch.bmm(_by_pixel(q), p)  # x, m, i
    return _to_map(_product(scores.transpose(0, 1), _by_line(v)), v)


def _mix_gradient(q: Tensor, v: Tensor, p: Tensor, dy: Tensor, needs: Sequence[bool]) -> tuple[Any, Any, Any]:
    """The gradients of q, v and p, the windows (x, k, i); None where they are not needed."""
    need_q, need_v, need_p = needs
    dq = dv = dp = None
    q_x, dy_m = _by_pixel(q), _by_line(dy)
    if need_v:
        dv = _to_map(_product(torch.bmm(q_x, p).permute(1, 2, 0), dy_m), v)
    if need_q or need_p:
        ds = torch.bmm(dy_m, _by_line(v).transpose(1, 2)).transpose(0, 1)  # x, m, i
        if need_q:
            dq = _to_map(_product(ds, p.transpose(1, 2)).transpose(0, 1), q)
        if need_p:
            dp = torch.bmm(q_x.transpose(1, 2), ds)
    return dq, dv, dp


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`bmm(a, b)`; where it has few columns, a CPU is several times faster at its transpose."""
    if b.shape[2] < NARROW and b.device.type == "cpu":
        return torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(a, b)


def _pieces(q: Tensor) -> list[tuple[slice, slice, slice]]:
    """Parts of (batch, x, y), each of some images or of some lines of one; none where a batch stays whole."""
    batch, length, width, heads = q.shape[:4]
    if not _may_loop(q) or q.shape[:4].numel() * length <= MANY_SCORES:
        return []
    lines = max(1, MANY_SCORES // (length * length * heads))
    images, lines = max(1, lines // width), min(lines, width)
    return [
        (slice(image, image + images), slice(None), slice(line, line + lines))
        for image in range(0, batch, images)
        for line in range(0, width, lines)
    ]


def _may_loop(q: Tensor) -> bool:
    """Whether to loop over images: on a CPU, and never in a graph that is to serve all sizes of a batch."""
    return q.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def _by_pixel(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 3)  # x, m, channel


def _by_line(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1, 4).flatten(0, 2)  # m, x, channel


def _to_map(lines: Tensor, like: Tensor) -> Tensor:
    batch, _, width, heads, _ = like.shape
    return lines.unflatten(0, (batch, width, heads)).permute(0, 3, 1, 2, 4)  # batch, x, y, head, channel


BACKEND = Backend("torch", content_attention, positional_attention)
