"""Layers and residual blocks of networks for inference, in which a ReLU costs no pass over memory of its own."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeGuard

import torchvision
from timm.layers import ConvNormAct
from timm.models.byobnet import BottleneckBlock, DownsampleAvg, SelfAttnBlock
from torch import Tensor, fx, nn

from gsanet.functional.convolution import convolution_relu, pointwise_convolution
from gsanet.functional.fused.norms import is_halving, max_pool
from gsanet.inference.chains import Chains
from gsanet.layers.block_convolution import PLAIN, settings_of
from gsanet.layers.residual_block import CompiledBottleneckBlock, CompiledSelfAttnBlock, CompiledStage
from gsanet.layers.watched import has_hooks

__all__ = ["ConvolutionReLU", "InferenceBlock", "InferenceMaxPool2d", "PointwiseConvolution"]

# One step each for torch.fx, which could not follow the choices inside of them.
fx.wrap("convolution_relu")
fx.wrap("max_pool")
fx.wrap("pointwise_convolution")


class _TakenOver(nn.Conv2d):
    """Another way to compute a convolution.

    Args:
        convolution: Its parameters are taken over.
    """

    def __init__(self, convolution: nn.Conv2d):
        super().__init__(**settings_of(convolution))
        self.weight, self.bias = convolution.weight, convolution.bias


class ConvolutionReLU(_TakenOver):
    """A convolution with the ReLU behind it, and the residual between them if there is one."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """From (batch, channels, height, width) to the map; a residual of its shape is added before the ReLU."""
        assert self.bias is not None
        assert not isinstance(self.padding, str)
        return convolution_relu(x, self.weight, self.bias, residual, self.stride, self.padding, self.dilation)


class PointwiseConvolution(_TakenOver):
    """A 1x1 convolution with nothing behind it, of few pixels on a GPU by a kernel of this package."""

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the map."""
        return pointwise_convolution(x, self.weight, self.bias, self.stride)


def is_pointwise(convolution: nn.Conv2d) -> bool:
    """Whether a convolution is a product for each pixel and no more."""
    return convolution.kernel_size == (1, 1) and convolution.padding == (0, 0) and convolution.groups == 1


def takes_relu(convolution: nn.Module | None) -> TypeGuard[nn.Conv2d]:
    """Whether a convolution, its norm folded, can be a `ConvolutionReLU`."""
    return (
        isinstance(convolution, nn.Conv2d)
        and type(convolution) in PLAIN
        and convolution.groups == 1  # for others cuDNN has slower kernels, or none
        and convolution.padding_mode == "zeros"
        and not isinstance(convolution.padding, str)
        and convolution.bias is not None
    )


class InferenceMaxPool2d(nn.MaxPool2d):
    """Max pooling of 3 x 3 pixels with a stride of 2 and a padding of 1, on a GPU by a kernel of this package."""

    def __init__(self) -> None:
        super().__init__(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the map of half the size."""
        return max_pool(x)


def fuse_pools(chains: Chains) -> None:
    """Replace the max-pools that `InferenceMaxPool2d` is the same as."""
    for pool in chains.modules((nn.MaxPool2d,)):
        assert isinstance(pool, nn.MaxPool2d)
        if is_halving(pool) and not has_hooks(pool):
            chains.replace(pool, InferenceMaxPool2d())


@dataclass(frozen=True)
class _Layout:
    """The names of a residual block's children: relu(after(last(branch(x))) + shortcut(x)).

    Where the shortcut is None it is x if `identity_if_none`, and else there is none.
    """

    branch: tuple[str, ...]
    last: str
    after: tuple[str, ...]
    shortcut: str
    relu: str
    identity_if_none: bool = False


BOTTLENECK = _Layout(CompiledBottleneckBlock.BRANCH, "conv3_1x1", CompiledBottleneckBlock.AFTER, "shortcut", "act")
ATTENTION = _Layout(CompiledSelfAttnBlock.BRANCH, "conv3_1x1", CompiledSelfAttnBlock.AFTER, "shortcut", "act")

# Exactly these: a subclass may do anything else.
LAYOUTS: dict[type[nn.Module], _Layout] = {
    BottleneckBlock: BOTTLENECK,
    CompiledBottleneckBlock: BOTTLENECK,
    SelfAttnBlock: ATTENTION,
    CompiledSelfAttnBlock: ATTENTION,
    torchvision.models.resnet.BasicBlock: _Layout(
        ("conv1", "bn1", "relu"), "conv2", ("bn2",), "downsample", "relu", identity_if_none=True
    ),
    torchvision.models.resnet.Bottleneck: _Layout(
        ("conv1", "bn1", "relu", "conv2", "bn2", "relu"), "conv3", ("bn3",), "downsample", "relu", identity_if_none=True
    ),
}

# Modules that call their children in order.
SEQUENCES = (nn.Sequential, CompiledStage, ConvNormAct, DownsampleAvg)


class InferenceBlock(nn.Module):
    """A residual block that ends in a `ConvolutionReLU`. Made by `fuse_for_inference`.

    Its children and all else that it holds are those of the block whose place it takes.

    Args:
        block: A block of one of the types in `LAYOUTS`.
        branch: The names of the children that make the branch, up to the last convolution.
        last: The name of that convolution.
    """

    def __init__(self, block: nn.Module, branch: tuple[str, ...], last: str):
        super().__init__()
        vars(self).update(vars(block))
        self.names = branch, last, LAYOUTS[type(block)].shortcut

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the block's output."""
        branch, last, name_of_shortcut = self.names
        shortcut = getattr(self, name_of_shortcut)
        residual = x if shortcut is None else shortcut(x)
        for name in branch:
            x = getattr(self, name)(x)
        out: Tensor = self.get_submodule(last)(x, residual)
        return out


def fuse_blocks(chains: Chains, folded: Collection[nn.Module]) -> None:
    """Replace each residual block in which nothing stands between its last convolution, the sum and the ReLU.

    Args:
        chains: Of the network.
        folded: The convolutions that were made one with their norms.
    """
    for block in chains.modules(tuple(LAYOUTS)):
        layout = LAYOUTS[type(block)]
        last = _end(chains, getattr(block, layout.last))
        if last not in folded or not takes_relu(last) or not _ends_in_relu(block, layout):
            continue
        assert last.bias is not None
        shortcut = getattr(block, layout.shortcut)
        end = None if shortcut is None else _end(chains, shortcut)
        if end in folded and isinstance(end, nn.Conv2d) and end.bias is not None:
            # Two biases of one sum are one. The shortcut's own would be a pass over its map.
            last.bias.copy_(last.bias.double() + end.bias.double())
            end.bias = None
            if type(end) in PLAIN and is_pointwise(end):
                chains.replace(end, PointwiseConvolution(end))
        name_of_last = next(name for name, module in block.named_modules() if module is last)
        branch = _fuse_steps(chains, block, layout.branch, folded)
        chains.replace(last, ConvolutionReLU(last))
        chains.replace(block, InferenceBlock(block, branch, name_of_last))


def _fuse_steps(
    chains: Chains, block: nn.Module, names: tuple[str, ...], folded: Collection[nn.Module]
) -> tuple[str, ...]:
    """Make each convolution before a ReLU that the block uses in several places one with it; what is left to call."""
    left: list[str] = []
    waiting = None  # the convolution whose output has not changed since
    for name in names:
        module = getattr(block, name)
        if type(module) is nn.ReLU and waiting is not None:
            chains.replace(waiting, ConvolutionReLU(waiting))
            continue
        left.append(name)
        if module in folded and takes_relu(module):
            waiting = module
        elif not does_nothing(module):
            waiting = None
    return tuple(left)


def _ends_in_relu(block: nn.Module, layout: _Layout) -> bool:
    """Whether a ReLU follows the sum of the last convolution's output and a shortcut, and nobody looks on."""
    relu = getattr(block, layout.relu)
    return (
        type(relu) is nn.ReLU
        and not has_hooks(relu)
        and all(does_nothing(getattr(block, name)) for name in layout.after)
        and (getattr(block, layout.shortcut) is not None or layout.identity_if_none)
        and "forward" not in vars(block)  # someone's own
    )


def _end(chains: Chains, module: nn.Module) -> nn.Module | None:
    """The layer that makes a module's output, if nobody else calls or looks at what is on the way to it."""
    while chains.is_single(module) and not has_hooks(module):
        if type(module) not in SEQUENCES:
            return module
        working = [child for child in module.children() if not does_nothing(child)]
        if not working:
            return None
        module = working[-1]
    return None


def does_nothing(module: nn.Module) -> bool:
    """Whether a module gives what it is given, and nobody looks on."""
    return type(module) is nn.Identity and not has_hooks(module)
