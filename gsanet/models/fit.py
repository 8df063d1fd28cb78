"""Weights that were trained for other classes, another image size or other channels, made to fit a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gsanet.layers.relative import TABLES, resize_table

__all__ = ["check_fit", "fit_pretrained", "fit_state_dict", "layer_names"]


def fit_state_dict(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights trained at one image size, made to fit a model of another: only the tables differ."""
    target = model.state_dict()
    return {
        name: resize_table(tensor, len(target[name])) if name.endswith(TABLES) and name in target else tensor
        for name, tensor in state_dict.items()
    }


def fit_pretrained(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The same for timm, which itself adapts the head and the first convolution; weights that cannot fit are refused.

    torch's own complaint would name every tensor of the network.
    """
    config = model.pretrained_cfg
    adapted = set(layer_names(config.get("classifier")))
    if model.in_chans != 3:
        adapted |= set(layer_names(config.get("first_conv")))
    target = model.state_dict()
    allowed = {name for name in {*state_dict, *target} if name.rpartition(".")[0] in adapted or name.endswith(TABLES)}
    check_fit(state_dict, target, config.get("file") or config.get("hf_hub_id") or "the file", allowed)
    return fit_state_dict(state_dict, model)


def layer_names(layers: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of a network's last layers, or first: timm's `pretrained_cfg` has one, several or none."""
    return (layers,) if isinstance(layers, str) else tuple(layers or ())


def check_fit(weights: Mapping[str, Tensor], target: Mapping[str, Tensor], source: object, allowed: set[str]) -> None:
    """Refuse weights of another network, naming the first tensor that shows it; those allowed may differ."""
    none = torch.Size()
    for name in [*target, *(name for name in weights if name not in target)]:
        has, wants = (tensors[name].shape if name in tensors else none for tensors in (weights, target))
        if name not in allowed and (has != wants or (name in weights) != (name in target)):
            was = f"is {_shape(has)} there" if name in weights else "is missing there"
            now = f"is {_shape(wants)} in the model" if name in target else "is not in the model"
            raise ValueError(f"the weights of {source} do not fit the model: {name} {was} and {now}")


def _shape(shape: torch.Size) -> str:
    return "x".join(map(str, shape)) or "a number"
