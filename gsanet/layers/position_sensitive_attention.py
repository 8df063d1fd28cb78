"""Position-sensitive axial attention of "Axial-DeepLab" (Wang et al., 2020).

Attention along one line, where queries, keys and values all know the offset:

    y_a = sum over b of softmax_b(q_a k_b + q_a r^q_{b-a} + k_b r^k_{b-a}) (v_b + r^v_{b-a})

along columns, then the same with weights of its own along rows. Each of the three parts of a score, and both parts of
the output, go through a batch norm of their own before they are added, as does the projection to q, k and v; q and k
have half the channels of v.
"""

import torch
from torch import Tensor, nn

from gsanet.functional.backends import Axis
from gsanet.functional.checks import check_feature_map, check_half_heads
from gsanet.functional.fused import position_sensitive as fused
from gsanet.functional.fused.norms import applied_with, in_float32, keep_statistics
from gsanet.functional.lean import fit_table
from gsanet.functional.pooling import average_pool
from gsanet.functional.position_sensitive import split
from gsanet.layers.attention import Combination, Properties
from gsanet.layers.batch_norm import normalise
from gsanet.layers.relative import RelativeTables
from gsanet.layers.watched import is_watched


class PositionSensitiveAttention(RelativeTables):
    """Position-sensitive attention along columns, then along rows.

    The tables `rel_column` and `rel_row` hold r^q, r^k and r^v side by side, shared by the heads.

    Memory: on an NVIDIA GPU, with lines of up to 64 pixels, maps alone. Elsewhere for columns num_heads x height scores
    a pixel (for rows num_heads x width), in three parts that are normalised and added: about eight tensors of that
    size at the peak, seventeen with autograd.

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
        x = self.column(x, self.rel_column, "column")
        x = self.row(x, self.rel_row, "row")
        return average_pool(x, self.stride)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, stride={self.stride}, {super().extra_repr()}"


class LineAttention(nn.Module):
    """Position-sensitive attention along one axis of a map, with its projection and norms."""

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

    def forward(self, feature_map: Tensor, rel: Tensor, axis: Axis) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height, width); `rel` is r^q | r^k | r^v by offset."""
        projected = normalise(self.norm_qkv, self.qkv(feature_map))
        pixels = projected.permute(0, 2, 3, 1).unflatten(-1, (self.num_heads, -1))
        pixels = pixels if axis == "column" else pixels.transpose(1, 2)  # b, x, y, n, q | k | v
        table = fit_table(rel, pixels.shape[1], reach=None)
        attend = self._attend_by_moments if self._may_use_moments(pixels, table) else self._attend_by_scores
        out = attend(pixels, table)  # b, x, y, part, n, v
        out = out if axis == "column" else out.transpose(1, 2)
        return normalise(self.norm_out, out.flatten(3).permute(0, 3, 1, 2)).unflatten(1, (2, -1)).sum(dim=1)

    def _attend_by_scores(self, pixels: Tensor, table: Tensor) -> Tensor:
        """All scores, normalised by their norm."""
        length = pixels.shape[1]
        q, k, v = split(pixels)
        rel_q, rel_k, rel_v = split(table.to(q.dtype).unfold(0, length, 1).flip(0).transpose(1, 2))  # x, i, channel
        scores = torch.stack(
            (
                torch.einsum("bxynk,biynk->bnyxi", q, k),
                torch.einsum("bxynk,xik->bnyxi", q, rel_q),
                torch.einsum("biynk,xik->bnyxi", k, rel_k),
            ),
            dim=1,
        )  # b, part, n, y, x, i
        scores = self.norm_scores(scores.flatten(4, 5).flatten(1, 2)).unflatten(1, (3, self.num_heads)).sum(dim=1)
        weights = scores.unflatten(3, (length, length)).softmax(dim=-1).to(v.dtype)  # b, n, y, x, i
        return torch.stack(
            (torch.einsum("bnyxi,biynv->bxynv", weights, v), torch.einsum("bnyxi,xiv->bxynv", weights, rel_v)), dim=3
        )

    def _may_use_moments(self, pixels: Tensor, table: Tensor) -> bool:
        """Whether the norm of scores is one whose statistics are all there is to it, and kernels take the rest."""
        norm = self.norm_scores
        if type(norm) is not nn.BatchNorm2d or is_watched(norm) or not fused.takes(pixels, table):
            return False
        return pixels.shape[:3].numel() * pixels.shape[1] > 1 if norm.training else norm.running_var is not None

    def _attend_by_moments(self, pixels: Tensor, table: Tensor) -> Tensor:
        """The same without scores in memory: all that their norm does is to multiply each part of a head by a factor.

        What it adds is the same for all pixels, so that the softmax does not see it, and its gradient is zero.
        """
        norm = self.norm_scores
        weight, bias = in_float32(norm)
        rel_q, rel_k, rel_v = split(table)
        rel_k = rel_k.flip(0)  # as keys see those who attend
        if norm.training:
            seen = torch.cat((rel_q, rel_k, rel_v), dim=-1).to(pixels.dtype)
            count = pixels.shape[:3].numel() * pixels.shape[1]
            mean, mean_square = fused.position_sensitive_sums(pixels, seen).flatten(1) / count
            variance = (mean_square - mean.square()).clamp_min(0)
            keep_statistics(norm, applied_with(mean, variance, weight, bias, norm.eps), count)
        else:
            assert norm.running_var is not None
            variance = norm.running_var.float()
        factors = torch.rsqrt(variance + norm.eps)
        if weight is not None:
            factors = factors * weight
        if bias is not None:
            factors = factors + 0 * bias
        content, by_query, by_key = factors.unflatten(0, (3, self.num_heads, 1, 1)).unbind()
        tables = torch.cat((rel_q * by_query, rel_k * by_key, rel_v.expand(self.num_heads, -1, -1)), dim=-1)
        return fused.position_sensitive_attention(pixels, tables.to(pixels.dtype), content.flatten())
