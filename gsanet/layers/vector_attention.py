"""Both layers of "Exploring Self-Attention for Image Recognition" (SAN; Zhao et al., 2020).

Weights are vectors: one number for each group of eight channels. With phi, psi and beta linear and gamma a small
network, pairwise attention compares a pixel with one neighbour at a time, patchwise attention sees them all together:

    pairwise   y_a = sum over b of softmax_b(gamma([phi(x_a) - psi(x_b), P (a - b)])) beta(x_b)
    patchwise  y_a = sum over b of gamma([phi(x_a), psi(x_1), ..., psi(x_n)])_b beta(x_b)

gamma is batch norm, ReLU, linear, batch norm, ReLU, linear, which gives the printed parameters; behind the border the
map is mirrored, as in the authors' code. Biases that a batch norm or a softmax would cancel are left out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map, check_share, check_window
from gsanet.functional.local import local_mix, mirror
from gsanet.functional.pooling import average_pool
from gsanet.layers.attention import Attention, Combination, Properties


class VectorAttention(Attention):
    """Base of both: the maps phi, psi and beta, and the sum over the window.

    Args:
        dim: Input channels.
        dim_out: Output channels, and channels of beta. Default: dim.
        feat_size: Not needed: any size of map will do.
        stride: The output is average-pooled by stride x stride.
        share: Output channels that share a weight; divides dim_out.
        window: Height and width of the window, odd.
        dim_relation: Channels of phi and of psi. Default: dim / 16, as in the paper's networks.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    properties = Properties(everywhere=False, content=True, positional=True, combination=Combination.REPLACES)
    gamma: nn.Sequential

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        share: int = 8,
        window: int = 7,
        dim_relation: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dim_out = dim if dim_out is None else dim_out
        dim_relation = max(1, dim // 16) if dim_relation is None else dim_relation
        share, dim_out = check_share(share, dim_out)
        window = check_window(window)
        self.dim, self.dim_out, self.stride, self.share, self.window = dim, dim_out, stride, share, window
        self.dim_relation = dim_relation
        # One convolution for phi, psi and beta.
        self.maps = nn.Conv2d(dim, 2 * dim_relation + dim_out, 1, bias=False, device=device, dtype=dtype)
        self.make_gamma(dim_out // share, device=device, dtype=dtype)
        self.reset_parameters()

    def make_gamma(self, groups: int, **factory: Any) -> None:
        """Make the layers that turn relations into weights."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise so that phi, psi and beta start at unit variance behind a ReLU; gamma as torch does."""
        nn.init.kaiming_normal_(self.maps.weight, nonlinearity="relu")
        for module in self.modules():
            if module not in (self, self.maps) and callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        mapped = F.linear(x.permute(0, 2, 3, 1), self.maps.weight.flatten(1))
        phi, psi, beta = mapped.split((self.dim_relation, self.dim_relation, self.dim_out), dim=-1)  # b, x, y, c
        reach = self.window // 2
        weights = self.weigh(phi, mirror(psi, reach)).to(beta.dtype)  # b, x, y, group, offset
        out = local_mix(weights, mirror(beta, reach).unflatten(-1, (-1, self.share)), self.window)
        out = out.flatten(3).permute(0, 3, 1, 2)
        return average_pool(out, self.stride)

    def weigh(self, phi: Tensor, psi: Tensor) -> Tensor:
        """The weights (batch, x, y, group, offset); psi has the window's reach more on each side."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.dim}, {self.dim_out}, share={self.share}, window={self.window}, stride={self.stride}"


class PairwiseAttention(VectorAttention):
    """SAN's pairwise attention with the subtraction relation.

    Arguments as in `VectorAttention`.

    Positions are coordinates from -1 to 1 across the map; P is linear, so that only their difference matters.

    Memory: the relations are vectors, (dim_relation + 2) x window^2 numbers a pixel, and gamma normalises them over the
    batch, so they exist as a whole: four tensors of that size at the peak, eight with autograd. beta, which is four
    times as wide in the paper's networks, is never unfolded.
    """

    label = "pairwise attention"

    def make_gamma(self, groups: int, **factory: Any) -> None:
        """The network of one difference, and P."""
        width = self.dim_relation
        self.position = nn.Linear(2, 2, bias=False, **factory)
        self.gamma = nn.Sequential(
            nn.BatchNorm2d(width + 2, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(width + 2, width, 1, bias=False, **factory),
            nn.BatchNorm2d(width, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, groups, 1, bias=False, **factory),
        )

    def weigh(self, phi: Tensor, psi: Tensor) -> Tensor:
        """Softmax over the neighbours of gamma of each difference."""
        height, width = phi.shape[1:3]
        line = torch.arange(self.window, device=phi.device, dtype=phi.dtype) - self.window // 2
        steps = (line * (-2 / max(length - 1, 1)) for length in (height, width))  # a - b, in units of half the map
        offsets = self.position(torch.stack(torch.meshgrid(*steps, indexing="ij"), dim=-1))  # i, j, 2
        relations = torch.stack(
            [
                torch.cat(
                    (phi - psi[:, i : i + height, j : j + width], offsets[i, j].expand(*phi.shape[:3], 2)), dim=-1
                )
                for i in range(self.window)
                for j in range(self.window)
            ],
            dim=3,
        )  # b, x, y, o, c
        scores = self.gamma(relations.flatten(1, 2).permute(0, 3, 1, 2))  # b, group, xy, o
        return scores.softmax(dim=-1).permute(0, 2, 1, 3).unflatten(1, (height, width))


class PatchwiseAttention(VectorAttention):
    """SAN's patchwise attention with concatenation.

    Arguments as in `VectorAttention`.

    Memory: two tensors of dim_out / share x window^2 weights a pixel at the peak, and before they exist two of the
    concatenation, (window^2 + 1) x dim_relation numbers a pixel; with autograd three of the weights beside two of the
    concatenation, which the norm and the first linear layer keep.
    """

    label = "patchwise attention"

    def make_gamma(self, groups: int, **factory: Any) -> None:
        """The network of a whole window."""
        places = self.window**2 + 1
        self.norm = nn.BatchNorm2d(places * self.dim_relation, **factory)
        self.reduce = nn.Conv2d(places * self.dim_relation, groups, 1, bias=False, **factory)
        self.gamma = nn.Sequential(
            nn.BatchNorm2d(groups, **factory),
            nn.ReLU(inplace=True),
            nn.Conv2d(groups, groups * self.window**2, 1, **factory),
        )

    def reset_parameters(self) -> None:
        """As `VectorAttention`; without a softmax, the sum over the window starts no larger than one of its parts."""
        super().reset_parameters()
        last = self.gamma[-1]
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.div_(self.window)

    def weigh(self, phi: Tensor, psi: Tensor) -> Tensor:
        """Gamma of all of a window's vectors; no softmax."""
        height, width = phi.shape[1:3]
        places = [psi[:, i : i + height, j : j + width] for i in range(self.window) for j in range(self.window)]
        together = torch.cat((phi, *places), dim=-1).permute(0, 3, 1, 2)
        weights = self.gamma(self.reduce(F.relu(self.norm(together), inplace=True)))  # b, group x offset, x, y
        return weights.unflatten(1, (-1, self.window**2)).permute(0, 3, 4, 1, 2)
