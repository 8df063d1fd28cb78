"""Local relation: each pixel takes from its window what a softmax of squared differences says, in PyTorch's operators.

    y[x'] = sum over o of w[x', o] v[x' + o],   w[x', .] = softmax over o of prior[o] - (q[x'] - k[x' + o])^2

-(q - k)^2 is evaluated as 2 q k - k^2, which differs from it by q^2: the same for all neighbours, it cancels in the
softmax. A neighbour outside the map takes no part.
"""

import torch
from torch import Tensor

from gsanet.functional.local import local_mix, local_scores, outside


def relate_by_products(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """Mix the windows around every stride-th pixel of every stride-th row.

    Args:
        q: One number for each of these pixels and head, (batch, x', y', head).
        k: The same for all pixels, (batch, x, y, head).
        prior: What each offset of the window has ahead, (head, offset).
        v: What is mixed, (batch, x, y, head, channel).
        window: Pixels of its side, odd.
        stride: Of the output.
    """
    scores = local_scores(
        torch.stack((2 * q, torch.ones_like(q)), dim=-1), torch.stack((k, -k.square()), dim=-1),
        window=window, stride=stride, padding=window // 2,
    )  # fmt: skip
    hidden = outside((k.shape[1], k.shape[2]), window, k.device)[::stride, ::stride, None]
    weights = (scores + prior).masked_fill_(hidden, -torch.inf).softmax(dim=-1)  # b, x, y, n, o
    return local_mix(weights.to(v.dtype), v, window=window, stride=stride, padding=window // 2)
