"""Networks for questions that the paper leaves open: the GSA module with one thing changed.

They are registered with timm when this file is imported, and not listed by `gsanet models`: to be measured, not used.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from gsanet.functional import content_attention, global_self_attention
from gsanet.functional.attention import apply_norm, to_feature_map
from gsanet.functional.pooling import average_pool
from gsanet.layers import GlobalSelfAttention
from gsanet.models.gsa_resnet import RESNET38, RESNET50, entry_point, network_cfg

__all__: list[str] = []


class SplitGSA(GlobalSelfAttention):
    """The GSA module step by step, so that something can be done to q, k and v on their way."""

    def forward(self, x: Tensor) -> Tensor:
        """As the module's own, to rounding error."""
        parts = self.qkv(x).split((self.dim_key, self.dim_key, self.dim_out), dim=1)
        q, k, v = (self._to_heads(part) for part in self.prepare(*parts))
        out = to_feature_map(self.attend(q, k, v))
        return average_pool(out, self.stride)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What happens to them as maps (batch, channels, x, y)."""
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The GSA operation, (batch, x, y, head, channel)."""
        return global_self_attention(q, k, v, self.rel_column, self.rel_row, self.norm, self.reach)

    def _to_heads(self, part: Tensor) -> Tensor:
        return part.permute(0, 2, 3, 1).unflatten(-1, (self.num_heads, -1))


class QuerySoftmaxGSA(SplitGSA):
    """Content attention with a softmax over the channels of each query.

    Its output is then a convex combination of the context vectors, as in efficient attention; "we remove the softmax
    normalization on queries" is Section 3.1, and putting it back is said to cost a point.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Positional attention keeps its queries as they are: the sentence is of content attention."""
        positional = global_self_attention(q, None, v, self.rel_column, self.rel_row, self.norm, self.reach)
        return content_attention(F.softmax(q, dim=-1), k, v) + positional


class NormQKVGSA(SplitGSA):
    """Batch normalisation of q, k and v, as a reader might expect it behind a convolution."""

    def __init__(self, dim: int, *args: Any, **kwargs: Any):
        super().__init__(dim, *args, **kwargs)
        channels = (self.dim_key, self.dim_key, self.dim_out)
        self.norms = nn.ModuleList([nn.BatchNorm2d(each) for each in channels])

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each has its own norm."""
        q, k, v = (norm(part) for norm, part in zip(self.norms, (q, k, v), strict=True))
        return q, k, v


class NormedAxisGSA(SplitGSA):
    """One positional axis with the batch norm behind it that is otherwise between the two.

    "The positional attention layer consists of a column-only attention sub-layer, a batch normalization layer, and a
    row-only attention sub-layer" is Appendix B; what is left of the norm in Table 4, without one of the axes, it does
    not say.
    """

    def __init__(self, dim: int, *args: Any, **kwargs: Any):
        super().__init__(dim, *args, **kwargs)
        self.norm_behind = nn.BatchNorm2d(self.dim_out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Content attention is added behind the norm."""
        positional = global_self_attention(q, None, v, self.rel_column, self.rel_row, None, self.reach)
        return content_attention(q, k, v) + apply_norm(self.norm_behind, positional)


class UnscaledTablesGSA(GlobalSelfAttention):
    """Embeddings of relative positions of variance 1 / k, whatever the length of the line."""

    def reset_parameters(self) -> None:
        """As the module's own, but for the tables."""
        super().reset_parameters()
        for table in (self.rel_column, self.rel_row):
            if table is not None:
                nn.init.normal_(table, std=math.sqrt(1 / table.shape[1]))


class HeKeysGSA(GlobalSelfAttention):
    """Keys that start with variance 2 / dim: the softmax chooses more than half of the pixels."""

    key_variance = 2.0

    def reset_parameters(self) -> None:
        """As the module's own, but for the keys."""
        super().reset_parameters()
        with torch.no_grad():
            keys = self.qkv.weight[self.dim_key : 2 * self.dim_key]
            nn.init.normal_(keys, std=math.sqrt(self.key_variance / self.dim))


class SharpKeysGSA(HeKeysGSA):
    """Keys that start with variance 8 / dim: the softmax chooses between a seventh and a third of the pixels."""

    key_variance = 8.0


# Name: settings. Of 38 layers, the fewest of the paper's, but for what stands beside Table 4, which is of 50.
NETWORKS = {
    "gsa_resnet38_query_softmax": replace(RESNET38, attention=QuerySoftmaxGSA),
    "gsa_resnet38_norm_qkv": replace(RESNET38, attention=NormQKVGSA),
    "gsa_resnet50_normed_axis": replace(RESNET50, attention=NormedAxisGSA),
    "gsa_resnet38_unscaled_tables": replace(RESNET38, attention=UnscaledTablesGSA),
    "gsa_resnet38_he_keys": replace(RESNET38, attention=HeKeysGSA),
    "gsa_resnet38_sharp_keys": replace(RESNET38, attention=SharpKeysGSA),
}

default_cfgs = generate_default_cfgs({name: network_cfg(settings, {}) for name, settings in NETWORKS.items()})

for _name, _settings in NETWORKS.items():
    globals()[_name] = entry_point(_name, _settings, __name__)
