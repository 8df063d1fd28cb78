"""The GSA module of "Global Self-Attention Networks for Image Recognition" (Shen, Bello et al.), Section 3.1.

Two layers in parallel over one projection: content attention, which sees every pixel and no position, and positional
attention, a column layer and a row layer with batch normalisation between them. Their sum is the output.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gsanet.functional import global_self_attention_map
from gsanet.functional.attention import attend_projected
from gsanet.functional.checks import check_counts, check_feature_map, check_heads
from gsanet.layers.attention import Combination, Properties
from gsanet.layers.relative import RelativeTables
from gsanet.layers.watched import is_watched


class GlobalSelfAttention(RelativeTables):
    """Global self-attention over a feature map, in the place of a spatial convolution.

    Args:
        dim: Input channels.
        dim_out: Output channels, and channels of v. Default: dim.
        feat_size: Height and width of the input map. Needed for positional attention unless `reach` is given.
        stride: The output is average-pooled by stride x stride.
        num_heads: Number of heads; divides dim_out and dim_key.
        dim_key: Channels of q and of k. Default: dim.
        content: Content attention.
        column: Positional attention along columns.
        row: Positional attention along rows, after the columns.
        reach: The largest offset that positional attention sees, the paper's L. Default: all of the map.
        keep_reach: Accept maps larger than `feat_size`; offsets that the tables do not hold contribute nothing.
        norm_layer: The normalisation between column and row.
        device: Where the parameters are made.
        dtype: Of the parameters.

    The relative position embeddings are `rel_column`, (2 * height - 1, dim_key / num_heads), and `rel_row`.
    """

    label = "GSA"
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.REPLACES)

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        num_heads: int = 8,
        dim_key: int | None = None,
        content: bool = True,
        column: bool = True,
        row: bool = True,
        reach: int | None = None,
        keep_reach: bool = False,
        norm_layer: type[nn.Module] = nn.BatchNorm2d,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        dim_out = dim if dim_out is None else dim_out
        dim_key = dim if dim_key is None else dim_key
        if not (content or column or row):
            raise ValueError("content, column and row are all False: a GSA module needs at least one of them")
        dim, stride = check_counts(dim=dim, stride=stride)
        num_heads, dim_out, dim_key = check_heads(num_heads, dim_out=dim_out, dim_key=dim_key)
        super().__init__(
            feat_size,
            dim_key // num_heads,
            column=column,
            row=row,
            reach=reach,
            keep_reach=keep_reach,
            device=device,
            dtype=dtype,
        )
        self.dim, self.dim_out, self.dim_key = dim, dim_out, dim_key
        self.stride, self.num_heads, self.content = stride, num_heads, content
        # One convolution for q, k and v; without content attention there is no k.
        channels = dim_out + (2 if content else 1) * dim_key
        self.qkv = nn.Conv2d(dim, channels, 1, bias=False, device=device, dtype=dtype)
        self.norm = norm_layer(dim_out, device=device, dtype=dtype) if column and row else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that neither branch starts much larger than the other.

        The paper leaves this open. With the length of the line in the variance of the embeddings, a positional sum over
        the line starts as large as one product of a query and a value; without it, the positional branch drowns the
        content branch. Content attention multiplies q by context vectors made of v, so it grows with both: a projection
        of variance 2 / dim lets it drown the positional branch (docs/initialisation.md has the measurements).
        """
        nn.init.normal_(self.qkv.weight, std=math.sqrt(1 / (3 * self.dim)))
        for axis, table in enumerate((self.rel_column, self.rel_row)):
            if table is not None:
                rows, width = table.shape
                length = rows if self.feat_size is None else min(rows, self.feat_size[axis])
                nn.init.normal_(table, std=math.sqrt(1 / (width * length)))
        if callable(reset := getattr(self.norm, "reset_parameters", None)):
            reset()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        self.check_size(x)
        tables_and_norm = (self.rel_column, self.rel_row, self.norm)
        settings: dict[str, Any] = {
            "num_heads": self.num_heads,
            "dim_key": self.dim_key,
            "content": self.content,
            "reach": self.reach,
            "stride": self.stride,
        }
        if not self.projects_as_defined:
            return attend_projected(self.qkv(x).permute(0, 2, 3, 1), *tables_and_norm, **settings)
        return global_self_attention_map(x, self.qkv.weight.flatten(1), *tables_and_norm, **settings)

    @property
    def projects_as_defined(self) -> bool:
        """Whether the weights of `qkv` are all there is to it, so that it need not be called.

        Not so where it has hooks, by which torch prunes for one, or where another layer has taken its place, such as
        one with low-rank updates.
        """
        return getattr(type(self.qkv), "forward", None) is nn.Conv2d.forward and not is_watched(self.qkv)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        components = {"content": self.content, "column": self.rel_column is not None, "row": self.rel_row is not None}
        parts = "+".join(name for name, on in components.items() if on)
        return (
            f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, dim_key={self.dim_key}, stride={self.stride}, "
            f"{parts}, {super().extra_repr()}"
        )
