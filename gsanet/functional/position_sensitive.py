"""Position-sensitive attention along one axis, in PyTorch's own operators, and the statistics of its scores.

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
    q, k, v = split(projected)
    f, g, h = (part.unfold(1, projected.shape[1], 1).flip(1) for part in split(tables))  # n, own, c, other
    scores = add_scores(
        content[:, None, None] * torch.einsum("bxynk,biynk->bynxi", q, k),
        torch.einsum("bxynk,nxki->bynxi", q, f),
        torch.einsum("biynk,nikx->bynxi", k, g),
    )
    weights = scores.softmax(dim=-1).to(v.dtype)
    return torch.stack(
        (torch.einsum("bynxi,biynv->bxynv", weights, v), torch.einsum("bynxi,nxvi->bxynv", weights, h)), dim=3
    )


def score_moments(projected: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the three parts of all scores, of each head: (part, head) each, in float32 at least.

    On long lines no score is made: sums over pixels of products of two channels have all that is needed.

    Args:
        projected: As in `attend_by_products`.
        table: One for all heads, (2 * length - 1, channel), in which keys see offsets from those who attend.
    """
    length, dtype = projected.shape[1], torch.promote_types(projected.dtype, torch.float32)
    q, k, _ = split(projected.to(dtype))
    f, g, _ = (part.unfold(0, length, 1).flip(0) for part in split(table.to(dtype)))  # x, c, i
    if length <= q.shape[-1]:  # rather pairs of pixels than of channels
        scores = (q[:, :, None] * k[:, None]).sum(dim=-1)  # b, x, i, y, n
        sums, squares = [scores.sum(dim=(0, 1, 2, 3))], [scores.square().sum(dim=(0, 1, 2, 3))]
    else:
        sums = [(q.sum(dim=1) * k.sum(dim=1)).sum(dim=(0, 1, 3))]
        squares = [(_squares(q).sum(dim=1) * _squares(k).sum(dim=1)).sum(dim=(0, 1, 3, 4))]
    for own, window in ((q, f), (k, g.permute(2, 1, 0))):  # of the pixel that the window is seen from: x, c, other
        sums.append((own.sum(dim=(0, 2)) * window.sum(dim=2)[:, None]).sum(dim=(0, 2)))
        products = torch.einsum("xci,xdi->xcd", window, window)
        squares.append((_squares(own).sum(dim=(0, 2)) * products[:, None]).sum(dim=(0, 2, 3)))
    count = projected.shape[:3].numel() * length
    mean = torch.stack(sums) / count
    return mean, (torch.stack(squares) / count - mean.square()).clamp_min(0)


def _squares(x: Tensor) -> Tensor:
    """Products of all pairs of channels."""
    return x[..., :, None] * x[..., None, :]
