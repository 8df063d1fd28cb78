"""How a network's attention modules meet its convolutions: the last column of Table 1, read off the network itself.

The network runs once, on the meta device, and each convolution over more than one pixel and each attention module is
noted as it runs. Then

- a convolution inside an attention module that reads that module's own input runs in parallel with the attention;
- if residual groups hold fewer spatial convolutions than the convolutional twin's, attention took their place;
- if all are there, attention was added: at the end if none of them runs after the first attention module, else in
  between.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gsanet.layers.attention import Attention, Combination
from gsanet.models import create_model


@dataclass(frozen=True)
class Placement:
    """Where attention modules and spatial convolutions stand in a network.

    Args:
        attention: Number of attention modules.
        convolutions: Spatial convolutions in the residual groups, those inside attention modules not counted.
        twin_convolutions: The same of the convolutional network of the same depth.
        parallel: Attention modules with a spatial convolution beside the attention.
        before: Of `convolutions`, those that run before the first attention module.
    """

    attention: int
    convolutions: int
    twin_convolutions: int
    parallel: int
    before: int

    @property
    def combination(self) -> Combination:
        """What that amounts to."""
        if self.parallel:
            return Combination.IN_PARALLEL
        if self.convolutions < self.twin_convolutions:
            return Combination.REPLACES
        return Combination.AT_THE_END if self.before == self.convolutions else Combination.INSERTED

    def __str__(self) -> str:
        words = {
            Combination.IN_PARALLEL: f"{self.parallel} of {self.attention} modules hold a convolution beside attention",
            Combination.REPLACES: f"{self.attention} modules, {self.convolutions} of {self.twin_convolutions} "
            "spatial convolutions left",
            Combination.AT_THE_END: f"{self.attention} after all {self.convolutions} spatial convolutions",
            Combination.INSERTED: f"{self.attention} among {self.convolutions} spatial convolutions, "
            f"{self.before} of them before the first",
        }
        return words[self.combination]


def placement(model: str, twin: str, img_size: int = 64) -> Placement:
    """Build a network and its convolutional twin, and see.

    Args:
        model: The network's name.
        twin: The name of the convolutional network with the same residual blocks.
        img_size: Of the image that is run.
    """
    network = _Walk(model, img_size)
    before = network.order.index("attention") if "attention" in network.order else len(network.order)
    return Placement(
        attention=len(network.attention),
        convolutions=network.order.count("convolution"),
        twin_convolutions=_Walk(twin, img_size).order.count("convolution"),
        parallel=len(network.parallel),
        before=network.order[:before].count("convolution"),
    )


class _Walk:
    """What runs in a network's residual groups and after them, in order."""

    def __init__(self, name: str, img_size: int):
        with torch.device("meta"):
            model: Any = create_model(name, img_size=img_size).eval()
        self.order: list[str] = []
        self.parallel: set[nn.Module] = set()
        self.attention = {module for module in model.modules() if isinstance(module, Attention)}
        self._input: dict[nn.Module, Tensor] = {}
        inside = {part: module for module in self.attention for part in module.modules()}
        in_groups = set(model.stages.modules())
        for module in model.modules():
            spatial = isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
            if module in inside:
                module.register_forward_pre_hook(self._note_attention(inside[module], spatial))
            elif spatial and module in in_groups:
                module.register_forward_pre_hook(lambda module, inputs: self.order.append("convolution"))
        with torch.no_grad():
            model(torch.empty(1, 3, img_size, img_size, device="meta"))

    def _note_attention(self, owner: nn.Module, spatial: bool) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.order.append("attention")
            if module is owner:
                self._input[owner] = inputs[0]
            elif spatial and inputs[0] is self._input.get(owner):
                self.parallel.add(owner)

        return hook
