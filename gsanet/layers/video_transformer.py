"""The transformer of "VideoBERT: A Joint Model for Video and Language Representation Learning" (Sun et al., 2019).

BERT over the frames of a clip: a class token and one vector f_t a frame, each with a learned embedding of its place,

    x_t = LN(W f_t + p_t),  then in every layer  x <- LN(x + MHA(x)),  x <- LN(x + FFN(x))

The clip is classified from the class token. VideoBERT turns frames into words of a learned vocabulary first, so that
BERT's masked-word training applies; here, without text, the frames' vectors enter as they are. Its size is BERT-large,
24 layers of 1024 channels and 16 heads, twelve times a ResNet-50; the default here is BERT-small, 4 layers of 512
channels and 8 heads, so that the network stays near the others in size. Memory: as `nn.TransformerEncoder`.
"""

import math

import torch
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map, check_heads
from gsanet.layers.attention import Attention, Combination, Properties


class VideoTransformer(Attention):
    """A BERT encoder over frames, with a class token.

    Args:
        dim: Channels of a frame's vector.
        dim_out: Channels of the transformer.
        num_heads: Number of heads; divides dim_out.
        depth: Number of layers.
        max_frames: Longest clip that there are positions for. BERT's 512 includes the class token.
        dropout: Dropout, where BERT has it.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "VideoBERT"
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.AT_THE_END)

    def __init__(
        self,
        dim: int,
        dim_out: int = 512,
        num_heads: int = 8,
        depth: int = 4,
        max_frames: int = 511,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_heads, dim_out = check_heads(num_heads, dim_out=dim_out)
        self.dim, self.dim_out, self.max_frames = dim, dim_out, max_frames
        self.project = nn.Linear(dim, dim_out, device=device, dtype=dtype)
        self.class_token = nn.Parameter(torch.empty(dim_out, device=device, dtype=dtype))
        self.positions = nn.Parameter(torch.empty(1 + max_frames, dim_out, device=device, dtype=dtype))
        self.norm = nn.LayerNorm(dim_out, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            dim_out, num_heads, 4 * dim_out, dropout, "gelu", batch_first=True, device=device, dtype=dtype
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as BERT, whose standard deviation of 0.02 is for 1024 inputs; fewer ask for larger weights.

        With 0.02 at 512 channels, little of a frame reaches the class token, and training starts slower.
        """
        for name, parameter in self.named_parameters():
            if "norm" in name and name.endswith("weight"):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name in ("class_token", "positions"):
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.normal_(parameter, std=0.02 * math.sqrt(1024 / parameter.shape[1]))

    def encode(self, frames: Tensor) -> Tensor:
        """From frames (batch, time, dim) to (batch, 1 + time, dim_out), the class token first."""
        if frames.dim() != 3 or frames.shape[2] != self.dim:
            raise ValueError(f"frames must be (batch, time, {self.dim}), got {tuple(frames.shape)}")
        batch, time = frames.shape[:2]
        if time > self.max_frames:
            raise ValueError(f"a clip of {time} frames is longer than the {self.max_frames} that have a position")
        projected = self.project(frames)
        token = self.class_token.to(projected.dtype).expand(batch, 1, -1)
        x = torch.cat([token, projected], dim=1) + self.positions[: 1 + time]
        return self.encoder(self.dropout(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height, width): pixels, row by row, as the frames."""
        check_feature_map(x, self.dim)
        encoded = self.encode(x.flatten(2).transpose(1, 2))[:, 1:]
        return encoded.transpose(1, 2).unflatten(2, x.shape[2:])
