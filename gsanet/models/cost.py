"""Parameters and operations of a network, counted and not estimated.

One multiplication and one addition are two operations, as in the paper. The network runs on the meta device, where
nothing is computed, and with the backend `reference`, so that the count is of the equations and not of the way in which
a backend happens to evaluate them.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gsanet.functional import use_backend
from gsanet.functional.checks import check_size
from gsanet.layers.attention import Attention

Size = tuple[int, int]


@dataclass(frozen=True)
class StageCost:
    """One child of a network: its output shape (channels, height, width), parameters and operations."""

    name: str
    blocks: int
    operation: str
    shape: tuple[int, ...]
    params: int
    flops: int


def count_parameters(module: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def count_flops(model: nn.Module, img_size: int | Size | None = None) -> int:
    """The operations of one image's forward pass.

    Args:
        model: A network that takes (batch, channels, height, width).
        img_size: Default: the one that the network was made for.
    """
    return _run(model, img_size)[0].get_total_flops()


def stage_costs(model: Any, img_size: int | Size | None = None) -> list[StageCost]:
    """Parameters and operations of the stem, each residual group, what follows them, and the head of a ByobNet."""
    counter, shapes = _run(model, img_size)
    by_module = counter.get_flop_counts()
    root = type(model).__name__
    parts = {"stem": model.stem, **{f"stages.{i}": s for i, s in enumerate(model.stages)}}
    if not isinstance(model.final_conv, nn.Identity):
        parts["final_conv"] = model.final_conv
    parts["head"] = model.head
    return [
        StageCost(
            name=name,
            blocks=sum(not isinstance(b, Attention) for b in part) if name.startswith("stages") else 1,
            operation=_operation(part),
            shape=shapes[name],
            params=count_parameters(part),
            flops=sum(by_module.get(f"{root}.{name}", {}).values()),
        )
        for name, part in parts.items()
    ]


def _operation(part: nn.Module) -> str:
    """How a part mixes pixels: its attention modules, or its largest convolution."""
    for module in part.modules():
        if isinstance(module, Attention):
            return module.label
    kernels = [module.kernel_size[0] for module in part.modules() if isinstance(module, nn.Conv2d)]
    return f"{max(kernels)}x{max(kernels)} conv" if kernels else "linear"


def _run(model: Any, img_size: int | Size | None) -> tuple[FlopCounterMode, dict[str, tuple[int, ...]]]:
    height, width = _input_size(model, img_size)
    channels: int = getattr(model, "in_chans", 3)
    model = copy.deepcopy(model).to("meta").eval()
    shapes: dict[str, tuple[int, ...]] = {}

    def remember(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                shapes[name] = tuple(output.shape[1:])

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(remember(name))
    with use_backend("reference"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, channels, height, width, device="meta"))
    return counter, shapes


def _input_size(model: nn.Module, img_size: int | Size | None) -> Size:
    if img_size is None:
        img_size = getattr(model, "img_size", None)
    if img_size is None:
        img_size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[-2:]
    return check_size("img_size", img_size)
