"""The double attention block of "A2-Nets: Double Attention Networks" (Chen et al., 2018).

Gather, then distribute: each of n attention maps over all pixels pools one vector, and each pixel picks from the n
vectors by an attention of its own,

    y_i = x_i + BN(W sum over n of softmax_n(rho(x_i))_n (sum over j of softmax_j(theta(x_j)_n) phi(x_j)))

The first softmax runs over pixels, the second over the n vectors. Several public versions let both run over pixels;
then a pixel's shares of the gathered vectors do not add up to one. Memory: three maps of dim_inner channels, and
dim_inner x dim_inner gathered numbers an image; nothing grows with the square of the pixels.
"""

import math

import torch
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map
from gsanet.layers.attention import Attention, Combination, Properties


class DoubleAttention(Attention):
    """Double attention block: gathers global vectors, distributes them to the pixels, added to its input.

    Args:
        dim: Channels.
        dim_inner: Channels of the gathered vectors, and their number. Default: half of dim.
        zero_init_last: Start as the identity: the scale of the last normalisation is zero.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "double attention"
    properties = Properties(everywhere=True, content=True, positional=False, combination=Combination.INSERTED)

    def __init__(
        self,
        dim: int,
        dim_inner: int | None = None,
        zero_init_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim, self.dim_inner, self.zero_init_last = dim, dim_inner or dim // 2, zero_init_last
        self.project = nn.Linear(dim, 3 * self.dim_inner, device=device, dtype=dtype)  # phi | theta | rho
        self.expand = nn.Linear(self.dim_inner, dim, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that all projections start at unit variance behind a ReLU."""
        nn.init.normal_(self.project.weight, std=math.sqrt(2 / self.dim))
        nn.init.normal_(self.expand.weight, std=math.sqrt(1 / self.dim_inner))
        nn.init.zeros_(self.project.bias)
        self.norm.reset_parameters()
        if self.zero_init_last:
            nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to the same shape."""
        check_feature_map(x, self.dim)
        pixels = x.flatten(2).transpose(1, 2)  # batch, pixels, dim
        features, gather, distribute = self.project(pixels).chunk(3, dim=-1)
        gathered = gather.softmax(dim=1).to(features.dtype).transpose(1, 2) @ features  # batch, n, dim_inner
        out = self.expand(distribute.softmax(dim=2).to(features.dtype) @ gathered)  # batch, pixels, dim
        return x + self.norm(out.transpose(1, 2).unflatten(2, x.shape[2:]))
