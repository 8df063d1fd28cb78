"""The module of "Efficient Attention: Attention with Linear Complexities" (Shen et al., 2018).

    y = x + W softmax_channels(Q) (softmax_pixels(K)^T V)

in each head: queries are normalised over the channels of a head, keys over all pixels. It is the content attention of
GSA but for the softmax on the queries, which GSA drops, and the output projection. Memory: the maps Q, K and V, and
a context of (dim_inner / heads)^2 numbers a head; nothing grows with the square of the pixels.
"""

import math

import torch
from torch import Tensor, nn

from gsanet.functional import content_attention
from gsanet.functional.checks import check_feature_map, check_heads
from gsanet.layers.attention import Attention, Combination, Properties


class EfficientAttention(Attention):
    """Efficient attention, added to its input.

    Args:
        dim: Channels.
        dim_inner: Channels of queries, of keys and of values. Default: half of dim.
        num_heads: Number of heads; divides dim_inner.
        zero_init_last: Start as the identity: the weights of the output projection are zero.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "efficient attention"
    properties = Properties(everywhere=True, content=True, positional=False, combination=Combination.INSERTED)

    def __init__(
        self,
        dim: int,
        dim_inner: int | None = None,
        num_heads: int = 8,
        zero_init_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dim_inner = dim_inner or dim // 2
        num_heads, dim_inner = check_heads(num_heads, dim_inner=dim_inner)
        self.dim, self.dim_inner, self.num_heads, self.zero_init_last = dim, dim_inner, num_heads, zero_init_last
        self.qkv = nn.Linear(dim, 3 * dim_inner, device=device, dtype=dtype)
        self.project = nn.Linear(dim_inner, dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that q, k and v start at unit variance behind a ReLU."""
        nn.init.normal_(self.qkv.weight, std=math.sqrt(2 / self.dim))
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.project.bias)
        if self.zero_init_last:
            nn.init.zeros_(self.project.weight)
        else:
            nn.init.normal_(self.project.weight, std=math.sqrt(1 / self.dim_inner))

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to the same shape."""
        check_feature_map(x, self.dim)
        qkv = self.qkv(x.permute(0, 2, 3, 1)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(dim=3)  # each: batch, x, y, head, channel
        out = content_attention(q.softmax(dim=-1).to(v.dtype), k, v)
        return x + self.project(out.flatten(3)).permute(0, 3, 1, 2)
