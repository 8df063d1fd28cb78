"""timm's batch norm with an activation; where `torch.compile` trains on a GPU a kernel takes its statistics."""

import torch
from timm.layers import BatchNormAct2d, register_notrace_module
from torch import Tensor, nn

from gsanet.functional.fused.norms import batch_norm, takes

__all__ = ["CompiledBatchNormAct2d"]


@register_notrace_module
class CompiledBatchNormAct2d(BatchNormAct2d):
    """The same as `BatchNormAct2d`, with the same state_dict; faster when compiled for training on an NVIDIA GPU.

    What `torch.compile` makes of a batch norm is fast but for the statistics, which its reductions take at half the
    speed of the memory. Here a kernel takes them, and the rest stays with the compiler, which fuses it with the ReLUs
    and sums around. In eager mode, in evaluation and on other devices the module is timm's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the same shape."""
        if torch.compiler.is_compiling() and takes(x, self):
            out: Tensor = self.act(self.drop(batch_norm(x, self)))
        else:
            out = super().forward(x)
        return out

    @staticmethod
    def convert(network: nn.Module) -> None:
        """Make all modules of a network that are exactly `BatchNormAct2d` modules of this class, in place."""
        for module in network.modules():
            if type(module) is BatchNormAct2d:
                module.__class__ = CompiledBatchNormAct2d  # nothing that it holds is different
