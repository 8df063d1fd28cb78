"""The local relation layer of "Local Relation Networks for Image Recognition" (Hu et al., 2019).

How much a pixel takes from a neighbour is the appearance composability of the two, a comparison of one query number
with one key number, and a geometry prior, a small network of the offset. Eight channels share a weight:

    y_a = sum over b in the window of softmax_b(-(q_a - k_b)^2 + g(b - a)) W x_b

Of the paper's comparisons, squared difference, absolute difference and product, this is the first. A neighbour outside
the map takes no part.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map, check_share, check_window
from gsanet.functional.fused import relation as fused
from gsanet.functional.relation import relate_by_products
from gsanet.layers.attention import Attention, Combination, Properties


class LocalRelation(Attention):
    """Aggregation over the window around each pixel, by how well two pixels compose and by their offset.

    Left open are where the channel transformation W stands and the width of the geometry network. Chosen: W before the
    aggregation, which gives LR-Net-50's printed parameters and operations (none: 3 M parameters fewer; behind a strided
    aggregation: 0.5 G operations fewer); the geometry network as wide inside as it is outside.

    Memory: on an NVIDIA GPU, with the default window, maps alone. Elsewhere three tensors of dim_out / share x window^2
    scores an output pixel at the peak, two of them in float32 where the input is half; the neighbourhoods are never
    unfolded.

    Args:
        dim: Input channels.
        dim_out: Output channels. Default: dim.
        feat_size: Not needed: any size of map will do.
        stride: Only every stride-th pixel of every stride-th row is computed, as in a convolution.
        share: Output channels that share a weight, the paper's m; divides dim_out.
        window: Height and width of the window, odd.
        transform: Whether there is W; without it dim_out is dim, and the layer stands behind a convolution.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "local relation"
    properties = Properties(everywhere=False, content=True, positional=True, combination=Combination.REPLACES)

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        share: int = 8,
        window: int = 7,
        transform: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dim_out = dim if dim_out is None else dim_out
        share, dim_out = check_share(share, dim_out)
        if not transform and dim_out != dim:
            raise ValueError(f"without a transformation dim_out must be dim, got {dim_out} and {dim}")
        window = check_window(window)
        self.dim, self.dim_out, self.stride, self.share, self.window = dim, dim_out, stride, share, window
        groups = dim_out // share
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Conv2d(dim, groups, 1, bias=False, **factory)
        self.key = nn.Conv2d(dim, groups, 1, bias=False, **factory)
        # No bias at the end: the same number for all neighbours would cancel in the softmax.
        self.geometry = nn.Sequential(
            nn.Linear(2, groups, **factory), nn.ReLU(), nn.Linear(groups, groups, bias=False, **factory)
        )
        self.value = nn.Conv2d(dim, dim_out, 1, bias=False, **factory) if transform else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that q and k start at unit variance behind a ReLU."""
        for conv in (self.query, self.key, self.value):
            if conv is not None:
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        for layer in self.geometry:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        pixels = x.permute(0, 2, 3, 1)  # b, x, y, c
        q = F.linear(pixels[:, :: self.stride, :: self.stride], self.query.weight.flatten(1))
        k = F.linear(pixels, self.key.weight.flatten(1))
        # One number a group is little to store, and squares are large: not in half precision.
        q, k = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (q, k))
        v = pixels if self.value is None else F.linear(pixels, self.value.weight.flatten(1))
        mixed = local_relation(
            q, k, self.prior().to(q.dtype), v.unflatten(-1, (-1, self.share)), self.window, self.stride
        )
        return mixed.flatten(3).permute(0, 3, 1, 2)

    def prior(self) -> Tensor:
        """The geometry prior of each group and offset, (group, offset), from offsets in units of the reach."""
        weight = self.key.weight
        line = torch.linspace(-1, 1, self.window, device=weight.device, dtype=weight.dtype)
        offsets = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1).flatten(0, 1)  # o, 2
        return self.geometry(offsets).T

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.dim}, {self.dim_out}, share={self.share}, window={self.window}, stride={self.stride}"


def local_relation(q: Tensor, k: Tensor, prior: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """As `relate_by_products`, in kernels where they take it."""
    relate = fused.local_relation if fused.takes(q, k, prior, v, window, stride) else relate_by_products
    return relate(q, k, prior, v, window, stride)
