"""Networks by name: timm's registry, with the names of this package and a hint when one is misspelt."""

from collections.abc import Mapping
from typing import Any

import timm
from torch import nn

from gsanet.suggest import suggest

MODULES = [
    "attention_resnet",
    "gsa_resnet",
    "inserted_resnet",
    "san",
]  # the files of this package that register networks


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Make a network of this package, or any other that timm knows.

    Args:
        name: As in `list_models()`; or `local-dir:FOLDER` or `hf-hub:USER/NAME` (see `gsanet.from_pretrained`).
        pretrained: Load the weights that belong to the name.
        kwargs: As in `timm.create_model`: `num_classes`, `in_chans`, `img_size`, `features_only`, ... and the options
            of the family (see `gsanet.models.GSAResNet`).
    """
    check_name(name)
    return timm.create_model(name, pretrained=pretrained, **kwargs)


def list_models(pattern: str = "", pretrained: bool = False) -> list[str]:
    """The names of this package's networks, optionally those that match a pattern such as `"gsa_*"`."""
    return timm.list_models(pattern, module=MODULES, pretrained=pretrained)


def as_typed(name: str, options: Mapping[str, Any]) -> str:
    """A network's name and options, as one types them."""
    return ", ".join([name, *(f"{option}={value}" for option, value in options.items())])


def check_name(name: str) -> None:
    """Refuse a name that timm does not know, and suggest the nearest."""
    architecture = name.split(".")[0]
    if ":" in name or timm.is_model(architecture):  # hf-hub:..., local-dir:...
        return
    raise ValueError(f"unknown model {name!r}: {suggest(architecture, list_models())}")
