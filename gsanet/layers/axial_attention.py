"""Axial content and positional attention: what Table 2 of the paper compares the GSA module with.

Described there as "a global attention module that attends based on both content and positions similar to"
stand-alone self-attention (Ramachandran et al., 2019) "but in an axial fashion". One axial layer is

    y_a = sum over b of softmax_b((q_a k_b + q_a r_{b-a}) / sqrt(k)) v_b

along a column, then, behind batch normalisation, along a row with the same queries and keys. Parameters and operations
are those that the paper prints. Stand-alone self-attention does not divide by sqrt(k); it is done here, as in every
later system, so that the softmax does not start saturated.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.attention import apply_norm, to_feature_map
from gsanet.functional.axial import attend_by_products
from gsanet.functional.checks import check_feature_map, check_heads
from gsanet.functional.fused import axial as fused
from gsanet.functional.lean import fit_table
from gsanet.functional.pooling import average_pool
from gsanet.layers.attention import Combination, Properties
from gsanet.layers.relative import RelativeTables


class AxialAttention(RelativeTables):
    """Softmax attention along columns, then along rows, by content and relative position.

    Args:
        dim: Input channels.
        dim_out: Output channels. Default: dim.
        feat_size: Height and width of the input map.
        stride: The output is average-pooled by stride x stride.
        num_heads: Number of heads; divides dim and dim_out.
        keep_reach: Accept maps larger than `feat_size`: the embeddings of offsets that the tables do not hold are zero.
        norm_layer: The normalisation between column and row.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "axial"
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.REPLACES)

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        num_heads: int = 8,
        keep_reach: bool = False,
        norm_layer: type[nn.Module] = nn.BatchNorm2d,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        dim_out = dim if dim_out is None else dim_out
        num_heads, dim, dim_out = check_heads(num_heads, dim=dim, dim_out=dim_out)
        super().__init__(feat_size, dim // num_heads, keep_reach=keep_reach, device=device, dtype=dtype)
        self.dim, self.dim_out, self.stride, self.num_heads = dim, dim_out, stride, num_heads
        self.qkv = nn.Conv2d(dim, 2 * dim + dim_out, 1, bias=False, device=device, dtype=dtype)
        self.norm = norm_layer(dim_out, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that q, k and v start at unit variance behind a ReLU, and both parts of a score are alike."""
        nn.init.normal_(self.qkv.weight, std=math.sqrt(2 / self.dim))
        for table in (self.rel_column, self.rel_row):
            assert table is not None
            nn.init.normal_(table)
        if callable(reset := getattr(self.norm, "reset_parameters", None)):
            reset()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        self.check_size(x)
        assert self.rel_column is not None
        assert self.rel_row is not None
        projected = F.linear(x.permute(0, 2, 3, 1), self.qkv.weight.flatten(1))  # b, x, y, q | k | v
        q, k, v = (
            part.unflatten(-1, (self.num_heads, part.shape[-1] // self.num_heads))
            for part in projected.split((self.dim, self.dim, self.dim_out), dim=-1)
        )
        column = axial_attention(q, k, v, self.rel_column)
        column = apply_norm(self.norm, column)
        row = axial_attention(q.transpose(1, 2), k.transpose(1, 2), column.transpose(1, 2), self.rel_row)
        return average_pool(to_feature_map(row.transpose(1, 2)), self.stride)


def axial_attention(q: Tensor, k: Tensor, v: Tensor, rel: Tensor) -> Tensor:
    """Attend along dimension 1 of maps (batch, x, y, head, channel); `rel` as in `positional_attention`."""
    table = fit_table(rel, q.shape[1], reach=None)
    tensors = fused.as_autocast(q, k, v, table)
    return fused.axial_attention(*tensors) if fused.takes(*tensors) else attend_by_products(q, k, v, table)
