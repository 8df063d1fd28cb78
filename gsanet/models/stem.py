"""The stem of a ResNet: a convolution, batch norm, ReLU and max pooling, of which the last three are one operator."""

from typing import Any

from timm.layers import BatchNormAct2d, ConvNormAct
from timm.models.byobnet import Stem
from torch import Tensor, nn

from gsanet.functional.fused.norms import is_halving, norm_relu_max_pool, takes
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.watched import is_watched

__all__ = ["PooledStem"]

NORMS = (BatchNormAct2d, CompiledBatchNormAct2d)


class PooledStem(Stem):
    """timm's stem with a max-pool, faster in training on an NVIDIA GPU.

    There nothing of the size of the map before the pooling is written but the convolution's output. Everywhere else,
    and where someone looks at what is between (hooks, `forward_intermediates`), it is timm's own.

    Its children and all else that it holds are those of the stem whose place it takes.

    Args:
        stem: One convolution with its norm, `conv1`, and `pool`.
    """

    def __init__(self, stem: Stem):
        nn.Module.__init__(self)
        self.__dict__.update(vars(stem))

    def forward(self, x: Tensor) -> Tensor:
        """From the image to the pooled map."""
        # torch.fx calls with what is no tensor, and is to see all layers.
        if not self.training or not isinstance(x, Tensor) or not self._has_known_layers():
            out: Tensor = super().forward(x)
            return out
        block: Any = self.conv1
        x = block.conv(x)
        return norm_relu_max_pool(x, block.bn) if takes(x, block.bn) else self.pool(block.bn(x))

    def _has_known_layers(self) -> bool:
        """Whether the operator does what the layers behind the convolution do, and nobody looks at one of them."""
        block, pool = self.conv1, self.pool
        if type(block) is not ConvNormAct or type(norm := block.bn) not in NORMS or block.aa is not None:
            return False
        return (
            type(norm.act) is nn.ReLU
            and type(norm.drop) is nn.Identity
            and type(pool) is nn.MaxPool2d
            and is_halving(pool)
            and not any(is_watched(module) for module in (block, norm, norm.act, norm.drop, pool))
        )
