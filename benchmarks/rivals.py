"""What ours is compared with: a folded ResNet-50, PyPI's gsa-pytorch as a module, and softmax attention."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from registry import SkippedError
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from gsanet.functional.pooling import average_pool


def fold_batch_norms(model: nn.Module) -> nn.Module:
    """A copy for inference in which each batch normalisation right after a convolution is part of it."""
    traced = torch.fx.symbolic_trace(copy.deepcopy(model).eval())
    modules: dict[str, Any] = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(modules[node.target], nn.BatchNorm2d):
            continue
        source = node.args[0]
        convolution = modules.get(source.target) if source.op == "call_module" else None
        if isinstance(convolution, nn.Conv2d) and len(source.users) == 1:
            traced.set_submodule(source.target, fuse_conv_bn_eval(convolution, modules[node.target]))
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


class GsaPytorch(nn.Module):
    """PyPI's gsa-pytorch with the interface of `GlobalSelfAttention`, so that it fits the same networks.

    Args:
        dim: Channels in and out.
        feat_size: Height and width of the input map.
        stride: The output is average-pooled by stride x stride.
        num_heads: Number of heads.
    """

    def __init__(
        self,
        dim: int,
        feat_size: int | tuple[int, int],
        stride: int = 1,
        num_heads: int = 8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.stride = stride
        length = feat_size if isinstance(feat_size, int) else max(feat_size)
        self.attention = load_gsa_pytorch()(dim=dim, dim_key=dim // num_heads, heads=num_heads, rel_pos_length=length)
        self.attention.to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim, height / stride, width / stride)."""
        return average_pool(self.attention(x), self.stride)


def load_gsa_pytorch() -> Any:
    """Its class, if it is installed."""
    try:
        from gsa_pytorch import GSA
    except ImportError as error:
        raise SkippedError("gsa-pytorch is not installed: pip install gsa-pytorch==0.2.2") from error
    return GSA


class SoftmaxAttention(nn.Module):
    """Multi-head attention over all pixels of a map, blind to position: a projection, and PyTorch's fastest kernel.

    Args:
        dim: Channels in and out.
        num_heads: Number of heads.
    """

    def __init__(self, dim: int, num_heads: int = 8):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to the same, channels-last."""
        height, width = x.shape[-2:]
        projected = F.linear(x.permute(0, 2, 3, 1).flatten(1, 2), self.qkv.weight.flatten(1))  # b, pixel, q | k | v
        q, k, v = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)  # b, head, pixel, channel
        return out.transpose(1, 2).flatten(2).unflatten(1, (height, width)).permute(0, 3, 1, 2)
