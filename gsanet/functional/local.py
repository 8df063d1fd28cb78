"""Products of a pixel with the pixels of the window around it: what all local attention modules are made of.

Maps are (batch, x, y, head, channel), as everywhere; a window of n x n pixels is its n * n offsets o in reading order.
The neighbour of output pixel x' at offset i is pixel `stride * x' + i - padding`, and nothing if that is outside:

    local_scores   s[x', o] = q[x'] k[x' + o]            one number for each offset
    local_mix      y[x']    = sum over o of w[x', o] v[x' + o]
    local_spread   y[x' + o] += w[x', o] q[x']           the transpose of local_mix, for their gradients

They are operators of this package (`gsanet.functional.local_ops`) but where only PyTorch's own will do: under
torch.func's transforms, which have rules for those alone, and in an export, which runs without this package. There the
neighbours are unfolded, n * n copies of the map.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gsanet.functional import local_ops
from gsanet.functional.exporting import is_exporting
from gsanet.functional.transforms import is_transformed


def local_scores(q: Tensor, k: Tensor, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    """The product of each q with its neighbours' k: (batch, x', y', head, offset)."""
    if not (is_transformed() or is_exporting()):
        return local_ops.local_scores(q, k, window, stride, padding)
    return (q[..., None] * _unfold(k, q.shape[1:3], window, stride, padding)).sum(-2)


def local_mix(weights: Tensor, v: Tensor, window: int, stride: int = 1, padding: int = 0) -> Tensor:
    """The sum of the neighbours' v with (batch, x', y', head, offset) weights: (batch, x', y', head, channel)."""
    if not (is_transformed() or is_exporting()):
        return local_ops.local_mix(weights, v, window, stride, padding)
    return (weights[..., None, :] * _unfold(v, weights.shape[1:3], window, stride, padding)).sum(-1)


def _unfold(x: Tensor, size: torch.Size, window: int, stride: int, padding: int) -> Tensor:
    """The neighbours of each output pixel, (batch, x', y', head, channel, offset), with zeros outside of the map."""
    for dim, length in zip((1, 2), size, strict=True):
        behind = max(0, stride * (length - 1) + window - padding - x.shape[dim])
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (padding, behind))
        x = x.unfold(dim, window, stride).narrow(dim, 0, length)
    return x.flatten(5)


def outside(size: tuple[int, int], window: int, device: torch.device) -> Tensor:
    """Which neighbours of a window centred on each pixel are not on the map: (x, y, offset)."""
    reach = window // 2
    offsets = torch.arange(-reach, reach + 1, device=device)
    x, y = (torch.arange(n, device=device)[:, None] + offsets for n in size)
    x, y = x.lt(0) | x.ge(size[0]), y.lt(0) | y.ge(size[1])
    return (x[:, None, :, None] | y[None, :, None, :]).flatten(2)


def mirror(x: Tensor, reach: int) -> Tensor:
    """A map (batch, x, y, ...) with `reach` more pixels on each side, mirrored, back and forth if the map is small."""
    for dim in (1, 2):
        length = x.shape[dim]
        period = max(2 * length - 2, 1)
        index = torch.arange(-reach, length + reach, device=x.device) % period
        x = x.index_select(dim, torch.where(index < length, index, period - index))
    return x
