"""The backend `reference`: Appendix B of the paper, one equation a line.

The contract that every other backend is tested against, output and gradients. It is written to be compared with the
paper, not to be fast: it materialises everything. Index names are the paper's: x, y pixels, n head, k, v channels,
i (column) or j (row) the pixel attended to; b, the batch, is added.
"""

import torch
from torch import Tensor

from gsanet.functional.backends import Axis, Backend


def content_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 4: keys normalised over the pixels, context vectors, redistributed by the queries."""
    k_hat = k.flatten(1, 2).softmax(dim=1).view_as(k)
    context = torch.einsum("bxynk,bxynv->bnkv", k_hat, v)
    return torch.einsum("bxynk,bnkv->bxynv", q, context)


def positional_attention(q: Tensor, v: Tensor, rel: Tensor, axis: Axis, reach: int | None) -> Tensor:
    """Equations 5 to 7: scores against the embedding of each offset, then the sum of values. No softmax."""
    p = reindex(rel, length=q.shape[1 if axis == "column" else 2], reach=reach)
    if axis == "column":
        s = torch.einsum("bxynk,xik->bxyin", q, p)
        return torch.einsum("bxyin,biynv->bxynv", s, v)
    s = torch.einsum("bxynk,yjk->bxyjn", q, p)
    return torch.einsum("bxyjn,bxjnv->bxynv", s, v)


def reindex(rel: Tensor, length: int, reach: int | None) -> Tensor:
    """Equations 5 and 6: from relative shifts, R[r, k], to absolute ones, P[x, i, k] = R[i - x, k], 0 out of reach."""
    middle = rel.shape[0] // 2
    limit = middle if reach is None else min(middle, reach)
    position = torch.arange(length, device=rel.device)
    shift = position[None, :] - position[:, None]  # x, i
    inside = shift.abs() <= limit
    return rel[(shift + middle).clamp(0, 2 * middle)] * inside[..., None]


BACKEND = Backend("reference", content_attention, positional_attention)
