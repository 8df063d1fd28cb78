"""Networks for inference: batch norms become part of what they follow, at the same results to rounding error."""

import copy
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from timm.layers import BatchNormAct2d, Conv2dSame, DropBlock2d, DropPath
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import FrozenBatchNorm2d

from gsanet.functional import global_self_attention_map
from gsanet.functional.attention import scale_and_shift
from gsanet.functional.checks import check_feature_map
from gsanet.functional.lean import fit_table
from gsanet.inference_blocks import ConvolutionReLU, fuse_blocks, fuse_pools, takes_relu
from gsanet.inference_chains import Chains
from gsanet.layers import GlobalSelfAttention
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.block_convolution import BlockConv2d
from gsanet.layers.relative import RelativeTables
from gsanet.layers.watched import has_hooks

__all__ = ["InferenceSelfAttention", "fuse_for_inference"]

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
      in convolution, sum and ReLU, the sum. On an NVIDIA GPU, in float16 and bfloat16, that is one call of cuDNN;
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
    return root[0].eval()  # what is new, too


class InferenceSelfAttention(RelativeTables):
    """A GSA module with fixed norms: its own, and one behind it with its activation. Made by `fuse_for_inference`.

    `weight` is the projection, (2 * dim_key + dim_out, dim). The norm between column and row is `norm`, and the one
    behind the module `finish`: scale and shift of each channel, (2, dim_out), in float32 whatever the module is
    converted to, or in float64 in a module of that.

    Args:
        attention: The module; its norm, if it has one, is a batch norm.
        norm: The batch norm behind it, or None.
        activation: What follows that, or None.
    """

    label = GlobalSelfAttention.label
    properties = GlobalSelfAttention.properties
    norm: Tensor | None
    finish: Tensor | None

    def __init__(
        self, attention: GlobalSelfAttention, norm: nn.Module | None = None, activation: nn.Module | None = None
    ):
        super().__init__(
            attention.feat_size,
            attention.dim_key // attention.num_heads,
            column=attention.rel_column is not None,
            row=attention.rel_row is not None,
            reach=attention.reach,
            keep_reach=attention.keep_reach,
            device="meta",  # nothing is stored before it is known
        )
        self.dim, self.dim_out, self.dim_key = attention.dim, attention.dim_out, attention.dim_key
        self.stride, self.num_heads, self.content = attention.stride, attention.num_heads, attention.content
        weight = attention.qkv.weight
        self.weight = nn.Parameter(weight.detach().flatten(1).contiguous(), requires_grad=False)
        for name in ("rel_column", "rel_row"):
            if (table := getattr(attention, name)) is not None:
                setattr(self, name, nn.Parameter(table.detach().contiguous(), requires_grad=False))
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for name, folded in {"norm": attention.norm, "finish": norm}.items():
            values = None if folded is None else torch.stack(_scale_and_shift(folded)).to(weight.device, dtype)
            self.register_buffer(name, values)
        # With a ReLU all of it is one kernel's work.
        self.ends_in_relu = norm is not None and type(activation) is nn.ReLU
        self.activation = activation if activation is not None and not self.ends_in_relu else nn.Identity()
        self._fitted: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to (batch, dim_out, height / stride, width / stride), channels-last."""
        check_feature_map(x, self.dim)
        self.check_size(x)
        out = global_self_attention_map(
            x,
            self.weight,
            self._fit("rel_column", x.shape[2]),
            self._fit("rel_row", x.shape[3]),
            self.norm,
            finish=self.finish if self.ends_in_relu else None,
            num_heads=self.num_heads,
            dim_key=self.dim_key,
            content=self.content,
            stride=self.stride,
        )
        if self.finish is not None and not self.ends_in_relu:
            out = scale_and_shift(out, self.finish)
        return self.activation(out)

    def _fit(self, name: str, length: int) -> Tensor | None:
        """A table with exactly the offsets of a line; one that needs zeros around it is kept."""
        table: Tensor | None = getattr(self, name)
        if table is None:
            return None
        furthest = len(table) // 2 if self.reach is None else min(self.reach, len(table) // 2)
        if furthest >= length - 1 or torch.compiler.is_compiling():
            return fit_table(table, length, self.reach)  # a view, or the compiler's to fuse
        source, fitted = self._fitted.get((name, length), (None, None))
        if fitted is None or source is not table:
            with torch.inference_mode(False), torch.no_grad():
                fitted = fit_table(table, length, self.reach)
            if not (table.is_cuda and torch.cuda.is_current_stream_capturing()):  # else it is the graph's own memory
                self._fitted[name, length] = table, fitted
        return fitted

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: getattr(self, name) for name in ("norm", "finish")}
        super()._apply(fn, recurse)
        self._fitted.clear()
        for name, values in before.items():
            if values is not None and (after := getattr(self, name)).dtype not in (torch.float32, torch.float64):
                setattr(self, name, values.to(after.device, torch.float32))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._fitted.clear()

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        behind = "" if self.finish is None else ", norm and ReLU behind it" if self.ends_in_relu else ", norm behind it"
        return (
            f"{self.dim}, {self.dim_out}, num_heads={self.num_heads}, dim_key={self.dim_key}, stride={self.stride}, "
            f"{super().extra_repr()}{behind}"
        )


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
    scale, shift = (values.to(weight.device) for values in _scale_and_shift(norm))
    folded = weight.double() * scale.view(-1, *(1,) * (weight.dim() - 1))
    if bias is not None:
        shift = shift + bias.double() * scale
    convolution.weight = nn.Parameter(folded.to(weight.dtype), requires_grad=False)
    convolution.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)


def _scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """What a batch norm with running statistics does to each channel, in float64."""
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


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
