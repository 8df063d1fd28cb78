"""Heads of any width, for kernels of whole modules, which move eight channels at a time: they get zeros behind them.

Zeros of q meet what they may, and add nothing; those of v are zeros in the output too, also behind a batch norm, whose
bias is zero there. So nothing else changes, and neither do the gradients of what was there before.
"""

import torch.nn.functional as F
from torch import Tensor

from gsanet.functional.fused.plan.shape import round_up

STEP = 8


def widened(width: int) -> int:
    """Channels of a head with those that are zeros."""
    return round_up(width, STEP)


def widen(x: Tensor, heads: int, dim: int = 0) -> Tensor:
    """The channels of so many heads, one behind the other along a dimension, each with its zeros; x if it has all."""
    width = x.shape[dim] // heads
    more = widened(width) - width
    if not more:
        return x
    behind = (0, 0) * (x.dim() - 1 - dim)
    return F.pad(x.unflatten(dim, (heads, width)), (*behind, 0, more)).flatten(dim, dim + 1)


def narrow(x: Tensor, heads: int, width: int) -> Tensor:
    """Of the channels of heads that were widened, the last dimension, those that were there before."""
    return x.unflatten(-1, (heads, -1))[..., :width].flatten(-2)
