"""Position-sensitive attention along one axis, in PyTorch's own operators, and sums of its scores.

A head's part of a map or of a table is q | k | v, with twice as many channels of v as of q and of k:

    s[x, i] = content q[x] k[i] + q[x] f[i - x] + k[i] g[x - i],  p[x, .] = softmax over i of s[x, i]
    y[x] = sum over i of p[x, i] v[i],  z[x] = sum over i of p[x, i] h[i - x]

with f, g, h the three parts of the head's table. Keys see offsets from where they are.
"""

import torch
from torch import Tensor

from gsanet.functional.scores import add_scores


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of a map, or of a table, along the last dimension."""
    width = x.shape[-1] // 4
    q, k, v = x.split((width, width, 2 * width), dim=-1)
    return q, k, v


def attend_by_products(projected: Tensor, tables: Tensor, content: Tensor) -> Tensor:
    """Attend along dimension 1 of a map.

    Args:
        projected: q | k | v of each head, (batch, x, y, head, channel).
        tables: f | g | h of each head and offset, (head, 2 * length - 1, channel).
        content: Factors of the products of queries and keys, (head).

    Returns:
        y and z, (batch, x, y, part, head, channel).
    """
    parts = _parts_of_scores(projected, tables)
    scores = add_scores(content[:, None, None] * parts[0], *parts[1:])
    v, h = split(projected)[2], _windows(split(tables)[2], projected.shape[1])
    weights = scores.softmax(dim=-1).to(v.dtype)
    return torch.stack(
        (torch.einsum("bynxi,biynv->bxynv", weights, v), torch.einsum("bynxi,nxvi->bxynv", weights, h)), dim=3
    )


def sum_scores(projected: Tensor, table: Tensor) -> Tensor:
    """The sums over all scores of each of their three parts, and of its squares: (2, part, head), in float32 at least.

    Args:
        projected: As in `attend_by_products`.
        table: One for all heads, (2 * length - 1, channel).
    """
    wide = torch.promote_types(projected.dtype, torch.float32)
    parts = _parts_of_scores(projected.to(wide), table.to(wide).expand(projected.shape[3], *table.shape))
    scores = torch.stack(parts).transpose(1, 3).flatten(2)  # part, head, b y x i
    return torch.stack((scores.sum(dim=2), scores.square().sum(dim=2)))


def _parts_of_scores(projected: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries and keys, of queries and offsets, of keys and offsets: (batch, y, head, x, i) each."""
    (q, k, _), (f, g, _) = split(projected), split(tables)
    length = projected.shape[1]
    return (
        torch.einsum("bxynk,biynk->bynxi", q, k),
        torch.einsum("bxynk,nxki->bynxi", q, _windows(f, length)),
        torch.einsum("biynk,nikx->bynxi", k, _windows(g, length)),
    )


def _windows(table: Tensor, length: int) -> Tensor:
    """What each pixel of a line sees of a table (head, offset, channel): (head, pixel, channel, other pixel)."""
    return table.unfold(1, length, 1).flip(1)
