"""What every attention module here says of itself: a name for tables, and its row of Table 1 of the paper."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from timm.layers import register_notrace_module
from torch import nn


class Combination(Enum):
    """How a system's attention modules meet the convolutional network: the last column of Table 1."""

    INSERTED = "inserted in between residual blocks"
    AT_THE_END = "added at the end"
    IN_PARALLEL = "in parallel with convolutions"
    REPLACES = "replaces convolutions"


@dataclass(frozen=True)
class Properties:
    """A row of Table 1.

    Args:
        everywhere: Global: each output pixel can draw on every input pixel.
        content: What is attended to depends on what the pixels hold.
        positional: And on where they are.
        combination: How the modules meet the convolutional network.
    """

    everywhere: bool
    content: bool
    positional: bool
    combination: Combination


class Attention(nn.Module):
    """Base of all attention modules. Their properties are claims, which the tests measure."""

    label: ClassVar[str]
    properties: ClassVar[Properties]
    normalised: ClassVar[bool] = False  # whether the output comes from a norm, so that a network adds none

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have timm's feature extraction by torch.fx take each module whole: it depends on the values of shapes."""
        super().__init_subclass__(**kwargs)
        register_notrace_module(cls)
