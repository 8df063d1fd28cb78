"""Softmax attention along one axis by content and relative position, in PyTorch's own operators."""

import torch
from torch import Tensor

from gsanet.functional.scores import add_scores


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attend along dimension 1 of maps (batch, x, y, head, channel).

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        table: Embeddings of exactly the offsets of a line, (2 * length - 1, k).
    """
    q = q * q.shape[-1] ** -0.5
    embeddings = table.unfold(0, q.shape[1], 1).flip(0)  # x, k, i
    scores = add_scores(
        torch.einsum("bxynk,biynk->bynxi", q, k),
        torch.einsum("bxynk,xki->bynxi", q, embeddings),
    )
    return torch.einsum("bynxi,biynv->bxynv", scores.softmax(dim=-1).to(v.dtype), v)
