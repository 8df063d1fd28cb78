"""Position-sensitive axial attention of "Axial-DeepLab" (Wang et al., 2020).

Attention along one line, where queries, keys and values all know the offset:

    y_a = sum over b of softmax_b(q_a k_b + q_a r^q_{b-a} + k_b r^k_{b-a}) (v_b + r^v_{b-a})

along columns, then the same with weights of its own along rows. Each of the three parts of a score, and both parts of
the output, go through a batch norm of their own before they are added, as does the projection to q, k and v; q and k
have half the channels of v.
"""

import torch
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map, check_half_heads
from gsanet.functional.lean import fit_table
from gsanet.functional.pooling import average_pool
from gsanet.layers.attention import Combination, Properties
from gsanet.layers.relative import RelativeTables


class PositionSensitiveAttention(RelativeTables):
    """Position-sensitive attention along columns, then along rows.

    The tables `rel_column` and `rel_row` hold r^q, r^k and r^v side by side, shared by the heads.

    Memory: for columns num_heads x height scores a pixel (for rows num_heads x width), in three parts that are
    normalised and added: about eight tensors of that size at the peak, seventeen with autograd.

    Args:
        dim: Input channels.
        dim_out: Output channels, and channels of v. Default: dim.
        feat_size: Height and width of the input map.
        stride: The output is average-pooled by stride x stride.
        num_heads: Number of heads; divides dim_out into an even number of channels.
        keep_reach: Accept maps larger than `feat_size`: the embeddings of offsets that the tables do not hold are zero.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "position-sensitive axial"
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.REPLACES)
    normalised = True

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        num_heads: int = 8,
        keep_reach: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        dim_out = dim if dim_out is None else dim_out
        num_heads, dim_out = check_half_heads(num_heads, dim_out)
        width = 2 * dim_out // num_heads
        super().__init__(feat_size, width, keep_reach=keep_reach, device=device, dtype=dtype)
        self.dim, self.dim_out, self.stride, self.num_heads = dim, dim_out, stride, num_heads
        self.column = LineAttention(dim, dim_out, num_heads, device=device, dtype=dtype)
        self.row = LineAttention(dim_out, dim_out, num_heads, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the authors do: the batch norms make up for the rest."""
        for line in (self.column, self.row):
            line.reset_parameters()
        for table in (self.rel_column, self.rel_row):
            assert table is not None
            nn.init.normal_(table, std=(self.dim_out / self.num_heads) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        self.check_size(x)
        assert self.rel_column is not None
        assert self.rel_row is not None
        x = self.column(x, self.rel_column)
        x = self.row(x.transpose(2, 3), self.rel_row).transpose(2, 3)
        return average_pool(x, self.stride)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, stride={self.stride}, {super().extra_repr()}"


class LineAttention(nn.Module):
    """Position-sensitive attention along the columns of a map, with its projection and norms."""

    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(dim, 2 * dim_out, 1, bias=False, device=device, dtype=dtype)
        self.norm_qkv = nn.BatchNorm2d(2 * dim_out, device=device, dtype=dtype)
        self.norm_scores = nn.BatchNorm2d(3 * num_heads, device=device, dtype=dtype)
        self.norm_out = nn.BatchNorm2d(2 * dim_out, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Unit variance for q, k and v; the norms start as identities."""
        nn.init.normal_(self.qkv.weight, std=self.qkv.in_channels**-0.5)
        for norm in (self.norm_qkv, self.norm_scores, self.norm_out):
            norm.reset_parameters()

    def forward(self, feature_map: Tensor, rel: Tensor) -> Tensor:
        """From (batch, dim, x, y) to (batch, dim_out, x, y) along x; `rel` is (2 * length - 1, r^q | r^k | r^v)."""
        length = feature_map.shape[2]
        projected = self.norm_qkv(self.qkv(feature_map)).unflatten(1, (self.num_heads, -1))  # b, n, q | k | v, x, y
        width = projected.shape[2] // 4
        q, k, v = projected.split((width, width, 2 * width), dim=2)
        table = fit_table(rel, length, reach=None).to(q.dtype).unfold(0, length, 1).flip(0)  # x, channel, i
        rel_q, rel_k, rel_v = table.split((width, width, 2 * width), dim=1)
        scores = torch.stack(
            (
                torch.einsum("bnkxy,bnkiy->bnyxi", q, k),
                torch.einsum("bnkxy,xki->bnyxi", q, rel_q),
                torch.einsum("bnkiy,xki->bnyxi", k, rel_k),
            ),
            dim=1,
        )  # b, part, n, y, x, i
        scores = self.norm_scores(scores.flatten(4, 5).flatten(1, 2)).unflatten(1, (3, self.num_heads)).sum(dim=1)
        weights = scores.unflatten(3, (length, length)).softmax(dim=-1).to(v.dtype)  # b, n, y, x, i
        parts = torch.stack(
            (torch.einsum("bnyxi,bnviy->bnvxy", weights, v), torch.einsum("bnyxi,xvi->bnvxy", weights, rel_v)), dim=1
        )
        out = self.norm_out(parts.flatten(1, 3))  # part x n x v as channels
        return out.unflatten(1, (2, -1)).sum(dim=1)
