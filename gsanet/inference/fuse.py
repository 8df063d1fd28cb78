"""Which layers of a network become part of which others."""

import copy
from typing import Any, TypeGuard

from timm.layers import BatchNormAct2d, Conv2dSame, DropBlock2d, DropPath
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import FrozenBatchNorm2d

from gsanet.inference.attention import InferenceSelfAttention, fixed_scale_and_shift
from gsanet.inference.attention_block import fuse_attention_blocks
from gsanet.inference.blocks import ConvolutionReLU, fuse_blocks, fuse_pools, takes_relu
from gsanet.inference.chains import Chains
from gsanet.layers import GlobalSelfAttention
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.block_convolution import BlockConv2d
from gsanet.layers.watched import has_hooks

__all__ = ["fuse_for_inference"]

# Exactly these: a subclass may do anything else with its weights, such as standardise them first.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv2dSame, BlockConv2d)
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d, CompiledBatchNormAct2d,
    FrozenBatchNorm2d,
)  # fmt: skip
TRAINING_ONLY = (_DropoutNd, DropPath, DropBlock2d)


def fuse_for_inference(model: nn.Module) -> nn.Module:
    """Make a faster copy of a network for inference, with the same outputs to rounding error.

    In the copy

    - a batch norm right behind a convolution is part of the convolution, which then has a bias. So is the ReLU behind
      both, if it is there only for them; and, where a residual block of timm's ByobNet or of torchvision's ResNets ends
      in convolution, sum and ReLU, the sum. On an NVIDIA GPU, in float16 and bfloat16, that is one call of cuDNN; on a
      CPU, in float32, where a 1x1 convolution has few pixels or one thread, one of a kernel of this package;
    - a GSA module is an `InferenceSelfAttention`: its batch norm, and the batch norm and ReLU behind it, are scales and
      shifts inside of it. On a GPU it is three to five kernels;
    - the max-pool of a ResNet's stem is, on a GPU, a kernel of this package;
    - dropout, stochastic depth and gradient checkpointing are left out.

    What follows what is read from the `forward` of each module; where that cannot be traced, and for norms behind
    anything else, layers stay as they are, as they do where someone has hooks on them. So do the names of modules and
    all methods of the network.

    The copy is in evaluation mode, and no parameter requires a gradient: for training keep the network itself. It can
    be moved, converted (`.to("cuda", torch.bfloat16)`: scales and shifts of GSA modules stay in float32), compiled,
    exported and saved like any other; to load its state_dict, fuse a network of the same settings first.

    Args:
        model: Any network: of this package, timm's, torchvision's, your own. It is not changed.

    Returns:
        The copy.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    root = nn.Sequential(copy.deepcopy(model)).eval()  # so that the network itself can be replaced too
    for parameter in root.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    _leave_out_training(root)
    chains = Chains(root, (*NORMS, GlobalSelfAttention))
    folded = set()
    for norm in chains.modules(NORMS):
        source = chains.before(norm)
        if not _has_fixed_statistics(norm) or source is None:
            continue
        if type(source) in CONVOLUTIONS:
            _fold(source, norm)
            folded.add(source)
            if takes_relu(source) and _take_relu(chains, norm):
                chains.replace(source, ConvolutionReLU(source))
            else:
                chains.replace(norm, _activation(norm))
        elif _is_foldable_attention(source):
            activation = _activation(norm)
            if isinstance(activation, nn.Identity) and chains.relu_after(norm):
                activation = nn.ReLU()  # the one behind it stays where it is: nothing changes a second time
                chains.leave_out_relu_after(norm)
            chains.replace(source, InferenceSelfAttention(source, norm, activation))
            chains.replace(norm, nn.Identity())
    fuse_blocks(chains, folded)
    fuse_pools(chains)
    for attention in chains.modules((GlobalSelfAttention,)):
        if _is_foldable_attention(attention) and not has_hooks(attention):
            chains.replace(attention, InferenceSelfAttention(attention))
    fuse_attention_blocks(root)
    return root[0].eval()  # what is new, too


def _leave_out_training(root: nn.Module) -> None:
    for module in list(root.modules()):
        if getattr(module, "grad_checkpointing", None) is True:
            module.grad_checkpointing = False  # type: ignore[assignment]
        for name, child in module.named_children():
            if isinstance(child, TRAINING_ONLY) and not has_hooks(child):
                setattr(module, name, nn.Identity())


def _fold(convolution: nn.Module, norm: nn.Module) -> None:
    """Make the norm part of the convolution, in place."""
    assert isinstance(convolution, CONVOLUTIONS)
    weight, bias = convolution.weight, convolution.bias
    scale, shift = (values.to(weight.device) for values in fixed_scale_and_shift(norm))
    folded = weight.double() * scale.view(-1, *(1,) * (weight.dim() - 1))
    if bias is not None:
        shift = shift + bias.double() * scale
    convolution.weight = nn.Parameter(folded.to(weight.dtype), requires_grad=False)
    convolution.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)


def _has_fixed_statistics(norm: Any) -> bool:
    return type(norm) in NORMS and norm.running_mean is not None and not has_hooks(norm)


def _activation(norm: nn.Module) -> nn.Module:
    """What a norm does besides normalising."""
    activation: nn.Module = norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity()
    return activation


def _take_relu(chains: Chains, norm: nn.Module) -> bool:
    """Leave out a norm with the ReLU inside of it or behind it; False where there is none, or it has other uses."""
    activation = _activation(norm)
    if isinstance(activation, nn.Identity):
        if not chains.relu_after(norm) or not chains.leave_out_relu_after(norm):
            return False
    elif type(activation) is not nn.ReLU or has_hooks(activation):
        return False
    chains.replace(norm, nn.Identity())
    return True


def _is_foldable_attention(module: nn.Module) -> TypeGuard[GlobalSelfAttention]:
    if type(module) is not GlobalSelfAttention or not module.projects_as_defined:
        return False
    norm = module.norm
    return norm is None or (_has_fixed_statistics(norm) and isinstance(_activation(norm), nn.Identity))
