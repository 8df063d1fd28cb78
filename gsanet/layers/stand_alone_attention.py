"""The layer and the stem of "Stand-Alone Self-Attention in Vision Models" (Ramachandran et al., 2019).

A pixel attends to the window around it. The embedding r of an offset is one of its row beside one of its column, half
of the channels each, shared by the heads:

    y_a = sum over b in the window of softmax_b(q_a k_b + q_a r_{b-a}) v_b

Each score is a sum over the channels of a head: one number for each neighbour and head. The paper does not divide the
scores by sqrt(k); with unit variance they then start with a spread of sqrt(2 k), and the weights are nearly one-hot, so
the projection to q starts smaller here by that factor. It leaves the border open: a neighbour outside the map takes no
part.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map, check_half_heads, check_window
from gsanet.functional.local import local_mix, local_scores, outside
from gsanet.functional.pooling import average_pool
from gsanet.functional.scores import add_scores
from gsanet.layers.attention import Attention, Combination, Properties


class StandAloneAttention(Attention):
    """Attention over the window around each pixel, by content and relative position.

    Memory: three tensors of num_heads x window^2 scores a pixel at the peak, four with autograd; keys and values are
    never unfolded.

    Args:
        dim: Input channels.
        dim_out: Output channels, and channels of q, k and v. Default: dim.
        feat_size: Not needed: any size of map will do.
        stride: The output is average-pooled by stride x stride.
        num_heads: Number of heads; divides dim_out into an even number of channels.
        window: Height and width of the window, odd.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "stand-alone attention"
    properties = Properties(everywhere=False, content=True, positional=True, combination=Combination.REPLACES)

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        num_heads: int = 8,
        window: int = 7,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dim_out = dim if dim_out is None else dim_out
        num_heads, dim_out = check_half_heads(num_heads, dim_out)
        window = check_window(window)
        self.dim, self.dim_out, self.stride, self.num_heads, self.window = dim, dim_out, stride, num_heads, window
        self.qkv = nn.Conv2d(dim, 3 * dim_out, 1, bias=False, device=device, dtype=dtype)
        half = dim_out // num_heads // 2
        self.rel_x = nn.Parameter(torch.empty(window, half, device=device, dtype=dtype))
        self.rel_y = nn.Parameter(torch.empty(window, half, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that k, v and the embeddings start at unit variance behind a ReLU, and scores too."""
        nn.init.kaiming_normal_(self.qkv.weight, nonlinearity="relu")
        with torch.no_grad():
            self.qkv.weight[: self.dim_out] *= (2 * self.dim_out / self.num_heads) ** -0.5
        nn.init.normal_(self.rel_x)
        nn.init.normal_(self.rel_y)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        projected = F.linear(x.permute(0, 2, 3, 1), self.qkv.weight.flatten(1))
        q, k, v = projected.unflatten(-1, (3, self.num_heads, -1)).unbind(3)  # b, x, y, n, k
        embeddings = offset_embeddings(self.rel_x, self.rel_y)  # o, k
        scores = add_scores(
            local_scores(q, k, self.window, padding=self.window // 2),
            torch.einsum("bxynk,ok->bxyno", q, embeddings.to(q.dtype)),
        )
        hidden = outside((x.shape[2], x.shape[3]), self.window, x.device)[:, :, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).to(v.dtype)
        out = local_mix(weights, v, self.window, padding=self.window // 2).flatten(3).permute(0, 3, 1, 2)
        return average_pool(out, self.stride)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, window={self.window}, stride={self.stride}"


class AttentionStem(Attention):
    """Stand-alone attention in the place of a ResNet's first convolution and max-pool.

    Pixels attend within blocks of 4x4. Single pixels say little, so what a pixel gives depends on its place (a, b) in
    the block: W_v is a mixture of four matrices, with weights p(a, b, m) = softmax over m of (e_a + e_b) n_m from
    learned embeddings of row and column. Then batch normalisation, and the largest of each block. The paper leaves
    open whether positions also enter the scores; they do here, which gives its printed FLOPs.

    Memory: at the peak the four values of each pixel, 4 x dim_out numbers at the resolution of the image, and two
    tensors of num_heads x 16 scores.

    Args:
        in_chans: Channels of the image.
        dim_out: Output channels.
        num_heads: Number of heads.
        mixture: Number of value matrices.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "attention stem"
    properties = StandAloneAttention.properties
    block = 4

    def __init__(
        self,
        in_chans: int = 3,
        dim_out: int = 64,
        num_heads: int = 8,
        mixture: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_heads, dim_out = check_half_heads(num_heads, dim_out)
        self.in_chans, self.dim_out, self.num_heads, self.mixture = in_chans, dim_out, num_heads, mixture
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Conv2d(in_chans, (2 + mixture) * dim_out, 1, bias=False, **factory)
        offsets, half = 2 * self.block - 1, dim_out // num_heads // 2
        self.rel_x, self.rel_y = (nn.Parameter(torch.empty(offsets, half, **factory)) for _ in range(2))
        self.place_x, self.place_y = (nn.Parameter(torch.empty(self.block, dim_out, **factory)) for _ in range(2))
        self.mixer = nn.Parameter(torch.empty(mixture, dim_out, **factory))
        self.norm = nn.BatchNorm2d(dim_out, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that k, v, the embeddings, the scores and the mixture's logits start at unit variance."""
        nn.init.normal_(self.qkv.weight, std=self.in_chans**-0.5)
        with torch.no_grad():
            self.qkv.weight[: self.dim_out] *= (2 * self.dim_out / self.num_heads) ** -0.5
        for embedding in (self.rel_x, self.rel_y, self.place_x, self.place_y):
            nn.init.normal_(embedding)
        nn.init.normal_(self.mixer, std=(2 * self.dim_out) ** -0.5)
        self.norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, in_chans, height, width) to (batch, dim_out, height / 4, width / 4)."""
        check_feature_map(x, self.in_chans)
        size, block = x.shape[-2:], self.block
        # Blocks at the border of a size that is no multiple of 4 are filled up with pixels that take no part.
        height, width = (-(-length // block) for length in size)
        x = F.pad(x, (0, width * block - size[1], 0, height * block - size[0]))
        blocks = x.unflatten(3, (width, block)).unflatten(2, (height, block)).permute(0, 2, 4, 3, 5, 1)
        projected = F.linear(blocks.flatten(3, 4), self.qkv.weight.flatten(1))  # b, x, y, place in the block, channel
        q, k, *values = projected.unflatten(-1, (2 + self.mixture, self.num_heads, -1)).unbind(4)  # ..., n, k
        rel = self.rel_by_places()  # place, place, k
        places = self.place_x[:, None] + self.place_y  # a, b, channel
        mix = (places.flatten(0, 1) @ self.mixer.T).softmax(dim=-1).to(q.dtype)  # place, m
        v = torch.einsum("bxypnkm,pm->bxypnk", torch.stack(values, dim=-1), mix)
        scores = add_scores(
            torch.einsum("bxypnk,bxyonk->bxynpo", q, k),
            torch.einsum("bxypnk,pok->bxynpo", q, rel.to(q.dtype)),
        )
        weights = scores.masked_fill(self.filled(size, x.device), -torch.inf).softmax(dim=-1).to(v.dtype)
        out = torch.einsum("bxynpo,bxyonk->bnkxpy", weights, v).flatten(1, 2)  # b, channel, x, place, y
        out = out.unflatten(3, (block, block)).movedim(4, 5).flatten(4, 5).flatten(2, 3)
        out = self.norm(out[..., : size[0], : size[1]])
        return F.max_pool2d(out, block, ceil_mode=True)

    def rel_by_places(self) -> Tensor:
        """The embedding of the offset from each place of a block to each other: (16, 16, channel of a head)."""
        block = self.block
        there = torch.arange(block, device=self.rel_x.device)
        offset = there - there[:, None] + block - 1  # here, there
        x, y = self.rel_x[offset], self.rel_y[offset]
        x = x[:, None, :, None].expand(-1, block, -1, block, -1)
        y = y[None, :, None, :].expand(block, -1, block, -1, -1)
        return torch.cat((x, y), dim=-1).flatten(2, 3).flatten(0, 1)

    def filled(self, size: torch.Size, device: torch.device) -> Tensor:
        """Which pixels of the blocks are not the image's: (x, y, 1, 1, place)."""
        beyond = [
            torch.arange(-(-length // self.block) * self.block, device=device).unflatten(0, (-1, self.block)) >= length
            for length in size
        ]
        return (beyond[0][:, None, :, None] | beyond[1][None, :, None, :]).flatten(2)[:, :, None, None]


def offset_embeddings(rel_x: Tensor, rel_y: Tensor) -> Tensor:
    """The embeddings of a window's offsets in reading order: the row's beside the column's, (window^2, channel)."""
    rows = rel_x[:, None].expand(-1, len(rel_y), -1)
    columns = rel_y[None].expand(len(rel_x), -1, -1)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)
