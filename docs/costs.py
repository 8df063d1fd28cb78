"""Operations of the layers of a GSA module, and of what they stand beside, counted and not derived.

A multiplication and an addition are two. Every layer takes and gives a map of `side` x `side` pixels with `dim`
channels, in eight heads where it has heads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gsanet.functional import content_attention, positional_attention, use_backend

HEADS = 8
LAYERS = ("3x3 convolution", "projection to Q, K, V", "content", "column", "row", "all pairs of pixels")


def operations(dim: int, side: int) -> dict[str, int]:
    """The operations of each of `LAYERS` for one image."""
    with torch.device("meta"):
        q, k, v = torch.empty(3, 1, side, side, HEADS, dim // HEADS)
        rel = torch.empty(2 * side - 1, dim // HEADS)
        x = torch.empty(1, dim, side, side)
        kernel, projection = torch.empty(dim, dim, 3, 3), torch.empty(3 * dim, dim, 1, 1)
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: F.conv2d(x, kernel, padding=1),
        lambda: F.conv2d(x, projection),
        lambda: content_attention(q, k, v),
        lambda: positional_attention(q, v, rel, "column"),
        lambda: positional_attention(q, v, rel, "row"),
        lambda: _all_pairs(q, k, v),
    )
    return {layer: _count(call) for layer, call in zip(LAYERS, calls, strict=True)}


def _all_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The usual attention: a score for every pair of pixels."""
    q, k, v = (part.flatten(1, 2).transpose(1, 2) for part in (q, k, v))  # batch, head, pixel, channel
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def _count(call: Callable[[], Tensor]) -> int:
    with use_backend("reference"), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()
