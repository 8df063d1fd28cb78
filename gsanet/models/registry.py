"""Networks by name: timm's registry, with the names of this package and a hint when one is misspelt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import nn

from gsanet.models.described import count_classes, read_description, read_shapes, shipped_weights
from gsanet.words import suggest

# The files of this package that register networks.
MODULES = ["attention_resnet", "gsa_resnet", "inserted_resnet", "san"]


def create_model(name: str, pretrained: bool | str | Path = False, **kwargs: Any) -> nn.Module:
    """Make a network of this package, or any other that timm knows.

    Args:
        name: As in `list_models()`; or `local-dir:FOLDER` or `hf-hub:USER/NAME` (see `gsanet.from_pretrained`).
        pretrained: Load weights. True: those that belong to the name; `list_models(pretrained=True)` has the networks
            whose weights come with this package. Else where they are: a safetensors file (of `gsanet pack`, or of a
            run), a folder written by `gsanet.save_pretrained`, or `hf-hub:USER/NAME`. What comes with the weights,
            such as the options of the network and the names of the classes, is in the model's `pretrained_cfg`.
        kwargs: As in `timm.create_model`: `num_classes` (another number than the weights' gets a new head), `in_chans`,
            `img_size` (the tables of relative positions are resized), `features_only`, ... and the options of the
            family (see `gsanet.models.GSAResNet`), over those that came with the weights.
    """
    check_name(name)
    if isinstance(pretrained, str | Path):
        return _create_from(name, pretrained, kwargs)
    if pretrained and name in list_models():
        shipped_weights(name)  # there are some, or the user is told where others could be
    return timm.create_model(name, pretrained=pretrained, **kwargs)


def list_models(pattern: str = "", pretrained: bool = False) -> list[str]:
    """The names of this package's networks, optionally those that match a pattern such as `"gsa_*"`.

    Args:
        pattern: Of names.
        pretrained: Only those whose weights come with this package.
    """
    return timm.list_models(pattern, module=MODULES, pretrained=pretrained)


def _create_from(name: str, source: str | Path, kwargs: dict[str, Any]) -> nn.Module:
    """A network with weights from a file, a folder or the Hub."""
    if not Path(source).is_file() and Path(source).suffix != ".safetensors":
        from gsanet.hub import from_pretrained

        place = str(source).removeprefix("local-dir:").removeprefix("hf-hub:")
        model: Any = from_pretrained(place, **kwargs)
        if (found := model.pretrained_cfg["architecture"]) != name:
            raise ValueError(f"{source} holds a {found}, not a {name}")
        return model
    described = read_description(source)
    if described.model not in ("", name):
        raise ValueError(f"{source} holds weights of {described.model}, not of {name}")
    config = described.config()
    if classes := count_classes(read_shapes(source), timm.get_pretrained_cfg(name).classifier):
        config["num_classes"] = classes
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=config, **{**described.options, **kwargs})


def as_typed(name: str, options: Mapping[str, Any]) -> str:
    """A network's name and options, as one types them."""
    return ", ".join([name, *(f"{option}={value}" for option, value in options.items())])


def check_name(name: str) -> None:
    """Refuse a name that timm does not know, and suggest the nearest."""
    architecture = name.split(".")[0]
    if ":" in name or timm.is_model(architecture):  # hf-hub:..., local-dir:...
        return
    raise ValueError(f"unknown model {name!r}: {suggest(architecture, list_models())}")
