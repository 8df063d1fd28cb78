"""Criss-cross attention of "CCNet: Criss-Cross Attention for Semantic Segmentation" (Huang et al., 2019).

A pixel u attends to the pixels C(u) of its own row and column, itself counted once:

    h'_u = h_u + sum over i in C(u) of softmax_i(q_u k_i) v_i

and the same attention, with the same weights, is applied a second time, after which every pixel has reached every
other one through a corner. Memory: height + width scores a pixel in place of height * width, once before and once
after the softmax.
"""

import math

import torch
from timm.layers import ConvNormAct
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map
from gsanet.layers.attention import Attention, Combination, Properties


class CrissCrossAttention(Attention):
    """Recurrent criss-cross attention.

    Args:
        dim: Channels, of the values too.
        dim_key: Channels of queries and keys. Default: an eighth of dim, as in the authors' code.
        recurrence: How often the attention is applied. Once reaches the row and the column, twice all of the map.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "criss-cross"
    # The paper marks it as content only, and it holds no embeddings of positions. But shuffling the pixels changes
    # which of them share a row or a column, and with it what they attend to: only shuffling whole rows or whole
    # columns just shuffles the output.
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.AT_THE_END)

    def __init__(
        self,
        dim: int,
        dim_key: int | None = None,
        recurrence: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if recurrence < 1:
            raise ValueError(f"recurrence must be 1 or more, got {recurrence}")
        self.dim, self.dim_key, self.recurrence = dim, dim_key or max(dim // 8, 1), recurrence
        self.qkv = nn.Linear(dim, 2 * self.dim_key + dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that scores and values start at unit variance behind a ReLU."""
        q, k, v = self.qkv.weight.split((self.dim_key, self.dim_key, self.dim))
        for weight in (q, k):  # a score is a sum of dim_key products, which the paper does not scale
            nn.init.normal_(weight, std=math.sqrt(2 / self.dim) * self.dim_key**-0.25)
        nn.init.normal_(v, std=math.sqrt(2 / self.dim))
        nn.init.zeros_(self.qkv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to the same shape, channels-last."""
        check_feature_map(x, self.dim)
        x = x.permute(0, 2, 3, 1)  # batch, x, y, dim
        for _ in range(self.recurrence):
            q, k, v = self.qkv(x).split((self.dim_key, self.dim_key, self.dim), dim=-1)
            x = x + criss_cross_attention(q, k, v)
        return x.permute(0, 3, 1, 2)


def criss_cross_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each pixel of maps (batch, x, y, channel) to its column and its row, under one softmax."""
    height, width = q.shape[1:3]
    column = torch.einsum("bxyc,biyc->bxyi", q, k)
    row = torch.einsum("bxyc,bxjc->bxyj", q, k)
    # The pixel itself is in its row and in its column: it counts in the row.
    itself = torch.eye(height, dtype=torch.bool, device=q.device)[:, None]  # x, 1, i
    scores = torch.cat([column.masked_fill(itself, -torch.inf), row], dim=-1)  # batch, x, y, height + width
    column, row = scores.softmax(dim=-1).to(v.dtype).split((height, width), dim=-1)
    return torch.einsum("bxyi,biyc->bxyc", column, v) + torch.einsum("bxyj,bxjc->bxyc", row, v)


class CrissCrossHead(nn.Module):
    """What CCNet puts on top of a CNN: a convolution to fewer channels, attention, and both maps fused.

    Args:
        dim: Channels of the CNN's map.
        dim_out: Channels of the attention and of the output.
        recurrence: As in `CrissCrossAttention`.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int = 512,
        recurrence: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim_out = dim_out
        self.reduce = ConvNormAct(dim, dim_out, 3, device=device, dtype=dtype)
        self.attention = CrissCrossAttention(dim_out, recurrence=recurrence, device=device, dtype=dtype)
        self.refine = ConvNormAct(dim_out, dim_out, 3, device=device, dtype=dtype)
        self.fuse = ConvNormAct(dim + dim_out, dim_out, 3, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height, width)."""
        return self.fuse(torch.cat([x, self.refine(self.attention(self.reduce(x)))], dim=1))
