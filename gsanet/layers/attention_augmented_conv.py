"""The attention-augmented convolution of "Attention Augmented Convolutional Networks" (Bello et al., 2019).

Some of a convolution's filters make place for multi-head attention over the whole map, with learned embeddings of the
relative height and the relative width:

    y = [conv(x), W_o [head_1, ..., head_n]],   head = softmax over b of ((q_a k_b + q_a r_{b-a}) / sqrt(k)) v_b

where r_{b-a} is the sum of an embedding of the vertical and one of the horizontal offset, shared by the heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map
from gsanet.functional.lean import fit_table
from gsanet.functional.scores import add_scores
from gsanet.layers.attention import Combination, Properties
from gsanet.layers.relative import RelativeTables


class AttentionAugmentedConv(RelativeTables):
    """A 3x3 convolution and global attention side by side, their outputs concatenated.

    The paper gives keys the fraction kappa = 0.2 and values the fraction upsilon = 0.1 of the output channels, with at
    least 20 channels of keys a head. It leaves open how a fraction is rounded and how attention follows a stride.
    Chosen: a head's channels are rounded to the nearest number, and a stride is taken before attention, by the 3x3
    average pooling that the paper uses to make a map smaller. This gives the printed parameters.

    Memory: the scores, num_heads x (height x width)^2 numbers an image, of the map that is attended over; there are
    two such tensors at the peak, and a third with autograd.

    Args:
        dim: Input channels.
        dim_out: Output channels, convolution and attention together. Default: dim.
        feat_size: Height and width of the input map.
        stride: Of the convolution.
        num_heads: Number of heads.
        key_ratio: Channels of q and of k, as a fraction of dim_out; at least 20 a head.
        value_ratio: Channels of v, as a fraction of dim_out.
        downsample: Attend over an output map that is this many times smaller (a power of 2), then enlarge the result.
        keep_reach: Accept maps larger than `feat_size`: the embeddings of offsets that the tables do not hold are zero.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "3x3 conv + attention"
    properties = Properties(everywhere=True, content=True, positional=True, combination=Combination.IN_PARALLEL)

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        stride: int = 1,
        num_heads: int = 8,
        key_ratio: float = 0.2,
        value_ratio: float = 0.1,
        downsample: int = 1,
        keep_reach: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        dim_out = dim if dim_out is None else dim_out
        reduction = stride * downsample
        if reduction < 1 or reduction & (reduction - 1):
            raise ValueError(f"stride and downsample must be powers of 2, got {stride} and {downsample}")
        if min(dim, num_heads) < 1 or dim_out <= num_heads:
            raise ValueError(f"dim_out must exceed the number of heads, got {dim_out} for {num_heads} heads")
        key = max(20, round(key_ratio * dim_out / num_heads))  # of one head
        value = max(1, round(value_ratio * dim_out / num_heads))
        super().__init__(feat_size, key, keep_reach=keep_reach, reduction=reduction, device=device, dtype=dtype)
        self.dim, self.dim_out, self.stride, self.num_heads, self.downsample = (
            dim,
            dim_out,
            stride,
            num_heads,
            downsample,
        )
        self.dim_key, self.dim_value = num_heads * key, num_heads * value
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.conv = nn.Conv2d(dim, dim_out - self.dim_value, 3, stride, 1, **factory)
        self.qkv = nn.Conv2d(dim, 2 * self.dim_key + self.dim_value, 1, **factory)
        self.proj = nn.Conv2d(self.dim_value, self.dim_value, 1, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that convolution, q, k and v start at unit variance behind a ReLU, and scores are alike."""
        for conv in (self.conv, self.qkv):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        nn.init.normal_(self.proj.weight, std=self.dim_value**-0.5)
        for table in (self.rel_column, self.rel_row):
            assert table is not None
            nn.init.normal_(table, std=0.5**0.5)  # the two tables together as large as a key

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride)."""
        check_feature_map(x, self.dim)
        self.check_size(x)
        convolved = self.conv(x)
        for _ in range(self.reduction.bit_length() - 1):
            x = F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)
        attended = self.proj(self.attend(x))
        if self.downsample > 1:
            attended = F.interpolate(attended, size=convolved.shape[-2:], mode="bilinear", align_corners=False)
        return torch.cat((convolved, attended), dim=1)

    def attend(self, x: Tensor) -> Tensor:
        """Multi-head attention over the map (batch, dim, height, width)."""
        assert self.rel_column is not None
        assert self.rel_row is not None
        height, width = x.shape[-2:]
        projected = F.linear(x.permute(0, 2, 3, 1), self.qkv.weight.flatten(1))  # b, x, y, q | k | v
        q, k, v = (
            part.unflatten(-1, (self.num_heads, part.shape[-1] // self.num_heads))
            for part in projected.split((self.dim_key, self.dim_key, self.dim_value), dim=-1)
        )
        q = q * q.shape[-1] ** -0.5
        columns = fit_table(self.rel_column, height, reach=None).unfold(0, height, 1).flip(0)  # x, k, i
        rows = fit_table(self.rel_row, width, reach=None).unfold(0, width, 1).flip(0)  # y, k, j
        scores = add_scores(
            torch.einsum("bxynk,bijnk->bnxyij", q, k),
            torch.einsum("bxynk,xki->bnxyi", q, columns).unsqueeze(-1),
            torch.einsum("bxynk,ykj->bnxyj", q, rows).unsqueeze(-2),
        )
        weights = scores.flatten(4).softmax(dim=-1).unflatten(-1, (height, width)).to(v.dtype)
        return torch.einsum("bnxyij,bijnv->bnvxy", weights, v).flatten(1, 2)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return (
            f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, dim_key={self.dim_key}, "
            f"dim_value={self.dim_value}, stride={self.stride}, downsample={self.downsample}, {super().extra_repr()}"
        )
