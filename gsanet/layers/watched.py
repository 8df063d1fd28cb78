"""Whether a layer does what its class says and nobody looks on: only then may others do its work for it."""

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether someone looks at what enters or leaves a module: then it keeps its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_watched(module: nn.Module) -> bool:
    """Whether someone looks at a module, forward or backward, or has put another `forward` in its place."""
    backward = module._backward_hooks or module._backward_pre_hooks
    return has_hooks(module) or bool(backward) or "forward" in vars(module)
