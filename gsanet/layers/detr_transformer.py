"""The transformer of "End-to-End Object Detection with Transformers" (DETR; Carion et al., 2020): its encoder.

Standard transformer layers over the pixels of a map. Sines and cosines P of a pixel's row and column are added to the
queries and keys, not to the values, of every layer:

    x <- LN(x + W sum over heads of softmax((Q (x + P)) (K (x + P))^T / sqrt(k)) V x),  x <- LN(x + FFN(x))

Memory: torch's fused attention holds no pixels x pixels scores where the device has it; elsewhere one such map a head.
"""

import math

import torch
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map, check_heads
from gsanet.layers.attention import Attention, Combination, Properties


class DETRTransformer(Attention):
    """DETR's encoder: from the map of a CNN to the encoded map, of any size.

    Args:
        dim: Input channels.
        dim_out: Channels of the transformer; a multiple of 4, for sine and cosine of row and column.
        num_heads: Number of heads; divides dim_out.
        depth: Number of layers.
        dim_feedforward: Inner channels of the feed-forward networks.
        dropout: Dropout on attention, within and behind the feed-forward networks, as in the paper.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "DETR"
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.AT_THE_END)

    def __init__(
        self,
        dim: int,
        dim_out: int = 256,
        num_heads: int = 8,
        depth: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if dim_out % 4:
            raise ValueError(f"dim_out must be a multiple of 4, got {dim_out}")
        num_heads, dim_out = check_heads(num_heads, dim_out=dim_out)
        self.dim, self.dim_out = dim, dim_out
        self.project = nn.Linear(dim, dim_out, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            EncoderLayer(dim_out, num_heads, dim_feedforward, dropout, device, dtype) for _ in range(depth)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as DETR: Xavier for all matrices."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.MultiheadAttention):
                nn.init.xavier_uniform_(module.in_proj_weight)
                nn.init.zeros_(module.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height, width), channels-last."""
        check_feature_map(x, self.dim)
        size = x.shape[2:]
        x = self.project(x.flatten(2).transpose(1, 2))  # batch, pixels, dim_out
        positions = sine_positions(size[0], size[1], self.dim_out, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, positions)
        return x.transpose(1, 2).unflatten(2, size)


class EncoderLayer(nn.Module):
    """A transformer layer like `nn.TransformerEncoderLayer`, which cannot add positions to queries and keys only."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        dim_feedforward: int,
        dropout: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.attention = nn.MultiheadAttention(
            dim, num_heads, dropout=dropout, batch_first=True, device=device, dtype=dtype
        )
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, dim_feedforward, device=device, dtype=dtype),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(dim_feedforward, dim, device=device, dtype=dtype),
            nn.Dropout(dropout),
        )
        self.norm2 = nn.LayerNorm(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """From (batch, pixels, dim) to the same shape."""
        placed = x + positions
        attended = self.attention(placed, placed, x, need_weights=False)[0]
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.feedforward(x))


def sine_positions(height: int, width: int, channels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of rows (first half of the channels) and columns: (height * width, channels).

    Both axes run from near 0 to 2 pi whatever the size of the map, and the frequencies fall from 1 to 1 / 10000.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = 10000.0 ** -(torch.arange(channels // 4, device=device, dtype=wide) / (channels // 4))
    axes = []
    for length in (height, width):
        angles = torch.arange(1, length + 1, device=device, dtype=wide) * (2 * math.pi / length)
        angles = angles[:, None] * frequencies
        axes.append(torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))  # length, channels / 2
    rows = axes[0][:, None].expand(height, width, -1)
    columns = axes[1][None].expand(height, width, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1).to(dtype)
