"""timm's batch norm with an activation; where `torch.compile` trains on a GPU kernels take its sums over pixels."""

import torch
from timm.layers import BatchNormAct2d, register_notrace_module
from torch import Tensor, nn

from gsanet.functional.fused.norms import batch_norm, takes
from gsanet.layers.watched import is_watched

__all__ = ["CompiledBatchNormAct2d", "normalise"]


@register_notrace_module
class CompiledBatchNormAct2d(BatchNormAct2d):
    """The same as `BatchNormAct2d`, with the same state_dict; faster when compiled for training on an NVIDIA GPU.

    What `torch.compile` makes of a batch norm is fast but for the sums over pixels, which its reductions take slower
    than the memory allows, and for the gradient of a ReLU behind it, which reads the ReLU's output. Here kernels take
    the sums, and whether the ReLU was open follows from the norm's input. The rest stays with the compiler, which fuses
    it with what is around. In eager mode, in evaluation and on other devices the module is timm's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the same shape."""
        if torch.compiler.is_compiling() and takes(x, self):
            if self._has_relu():
                return batch_norm(x, self, relu=True)
            out: Tensor = self.act(self.drop(batch_norm(x, self)))
        else:
            out = super().forward(x)
        return out

    def _has_relu(self) -> bool:
        """Whether nothing but a ReLU follows, and nobody looks on."""
        known = type(self.act) is nn.ReLU and type(self.drop) is nn.Identity
        return known and not is_watched(self.act) and not is_watched(self.drop)

    @staticmethod
    def convert(network: nn.Module) -> None:
        """Make all modules of a network that are exactly `BatchNormAct2d` modules of this class, in place."""
        for module in network.modules():
            if type(module) is BatchNormAct2d:
                module.__class__ = CompiledBatchNormAct2d  # nothing that it holds is different


def normalise(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """As `norm(x)`, faster in the same way."""
    plain = torch.compiler.is_compiling() and type(norm) is nn.BatchNorm2d and not is_watched(norm)
    out: Tensor = batch_norm(x, norm) if plain and takes(x, norm) else norm(x)
    return out
