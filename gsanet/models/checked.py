"""Networks that say in one sentence what is wrong with their input, before a layer inside does it in its own words."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.models.byobnet import ByobNet
from torch import Tensor, fx, nn

from gsanet.functional.autocast import autocast_dtype
from gsanet.functional.checks import check_feature_map, check_size
from gsanet.functional.transforms import call_with_norms

try:
    from timm.models._input import update_model_input_size
except ImportError:  # before version 1.0.31 timm does not write down what a network was fitted to

    def update_model_input_size(model: nn.Module, img_size: tuple[int, int]) -> None:
        """Nothing to write down."""


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # nothing is computed in others


def check_images(x: Tensor, channels: int, network: nn.Module) -> None:
    """Check what enters a network.

    Tracers pass: torch.fx calls with what is no tensor, and torch.jit.trace would warn of a comparison.
    """
    if isinstance(x, fx.Proxy) or torch.jit.is_tracing():
        return
    check_feature_map(x, channels)
    weight = next(network.parameters(), None)
    if weight is None or x.dtype == weight.dtype or weight.dtype not in FLOATS or autocast_dtype(x) is not None:
        return
    raise TypeError(f"the input is {x.dtype}, the network {weight.dtype}: convert one of them, as x.to({weight.dtype})")


def check_depths(depths: Sequence[int], most: int) -> None:
    """Check the numbers of residual blocks of each group; timm's network has two groups or more."""
    if not 2 <= len(depths) <= most or min(depths) < 1:
        raise ValueError(f"depths must be 2 to {most} numbers of blocks, got {depths}")


class CheckedNetwork(ByobNet):
    """timm's network; every way into it goes through the check."""

    img_size: tuple[int, int] | None

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Remember another image size, for counting and preprocessing; timm is told too."""
        self.img_size = check_size("img_size", img_size)
        update_model_input_size(self, self.img_size)

    def forward_features(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the last map."""
        check_images(x, self.in_chans, self)
        return call_with_norms(super().forward_features, x)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As timm's."""
        check_images(x, self.in_chans, self)
        return super().forward_intermediates(x, *args, **kwargs)


def check_features(features: nn.Module, channels: int) -> None:
    """Have what `features_only` makes of a network, whatever its class, check its input: it calls the network's layers.

    Args:
        features: One of timm's feature networks.
        channels: Of the images.
    """
    features.register_forward_pre_hook(partial(_check_input, channels=channels), with_kwargs=True)


def _check_input(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], *, channels: int) -> None:
    for x in (*inputs, *named.values()):  # there is one, with its name or without
        check_images(x, channels, module)
