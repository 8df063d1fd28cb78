"""The block of "Compact Generalized Non-local Network" (Yue et al., 2018), with the dot-product kernel.

Non-local attention between all (pixel, channel) pairs of a group of channels. With a dot product as the kernel the
sum over all pairs factorises into one number a group, so that nothing pairwise is ever held:

    y_g = x_g + GN(W_g theta(x)_g (phi(x)_g . g(x)_g))

The group normalisation has the same groups as the kernel, and normalising undoes any positive factor of a group: of
the attention phi . g only its sign is left, up to the epsilon of the normalisation. The authors' released code, whose
77.7 % Table 3 prints, is built alike; a test measures it. Memory: three maps of dim_inner channels, the products of two
of them, and the output before and after the normalisation, the last three in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map
from gsanet.layers.attention import Attention, Combination, Properties


class CompactNonLocal(Attention):
    """Compact generalized non-local block: attention across pixels and channels, added to its input.

    Args:
        dim: Channels.
        dim_inner: Channels of theta, phi and g. Default: half of dim.
        num_groups: Groups of channels that attend by themselves; divides dim and dim_inner.
        zero_init_last: Start as the identity: the scale of the last normalisation is zero.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "CGNL"
    properties = Properties(everywhere=True, content=True, positional=False, combination=Combination.INSERTED)

    def __init__(
        self,
        dim: int,
        dim_inner: int | None = None,
        num_groups: int = 8,
        zero_init_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dim_inner = dim_inner or dim // 2
        for name, value in {"dim": dim, "dim_inner": dim_inner}.items():
            if value % num_groups:
                raise ValueError(f"{name} must be divisible by num_groups, got {value} for {num_groups} groups")
        self.dim, self.num_groups, self.zero_init_last = dim, num_groups, zero_init_last
        self.project = nn.Conv2d(dim, 3 * dim_inner, 1, bias=False, device=device, dtype=dtype)  # theta | phi | g
        self.expand = nn.Conv2d(dim_inner, dim, 1, groups=num_groups, bias=False, device=device, dtype=dtype)
        self.norm = nn.GroupNorm(num_groups, dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the authors do."""
        nn.init.normal_(self.project.weight, std=0.01)
        nn.init.normal_(self.expand.weight, std=0.01)
        self.norm.reset_parameters()
        if self.zero_init_last:
            nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to the same shape."""
        check_feature_map(x, self.dim)
        theta, phi, g = self.project(x).chunk(3, dim=1)
        # The sum over thousands of products, and what it scales, leave the range of half precision: float32. A factor
        # of a group commutes with the grouped convolution, which can therefore come first.
        wide = torch.promote_types(theta.dtype, torch.float32)
        products = phi.to(wide) * g.to(wide)
        attention = products.unflatten(1, (self.num_groups, -1)).sum(dim=(2, 3, 4))  # batch, groups
        out = self.expand(theta).to(wide).unflatten(1, (self.num_groups, -1))  # batch, groups, channels, x, y
        out = (out * attention[:, :, None, None, None]).flatten(1, 2)
        weight, bias = self.norm.weight.to(wide), self.norm.bias.to(wide)
        return x + F.group_norm(out, self.num_groups, weight, bias, self.norm.eps).to(x.dtype)
