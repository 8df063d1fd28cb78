"""Networks that say in one sentence what is wrong with their input, before a layer inside does it in its own words."""

from typing import Any

import torch
from timm.models import FeatureListNet
from timm.models.byobnet import ByobNet
from torch import Tensor, fx

from gsanet.functional.checks import check_feature_map


def check_images(x: Tensor, channels: int) -> None:
    """Check what enters a network.

    Tracers pass: torch.fx calls with what is no tensor, and torch.jit.trace would warn of a comparison.
    """
    if not (isinstance(x, fx.Proxy) or torch.jit.is_tracing()):
        check_feature_map(x, channels)


class CheckedNetwork(ByobNet):
    """timm's network; every way into it goes through the check."""

    def forward_features(self, x: Tensor) -> Tensor:
        """From (batch, channels, height, width) to the last map."""
        check_images(x, self.in_chans)
        return super().forward_features(x)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As timm's."""
        check_images(x, self.in_chans)
        return super().forward_intermediates(x, *args, **kwargs)


class CheckedFeatures(FeatureListNet):
    """What `features_only` makes of a network: it calls its layers, not its methods.

    Args:
        model: The network.
        kwargs: As timm's.
    """

    def __init__(self, model: CheckedNetwork, **kwargs: Any):
        super().__init__(model, **kwargs)
        self.in_chans: int = model.in_chans

    def forward(self, x: Tensor) -> list[Tensor]:
        """From (batch, channels, height, width) to the maps."""
        check_images(x, self.in_chans)
        return super().forward(x)
