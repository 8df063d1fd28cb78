"""Files of weights that say what they are: safetensors whose metadata hold all that it takes to use them.

The metadata, each entry optional: `recipe` (YAML: the network, its options, the image size, the normalisation, and how
it was trained), `classes` (a JSON list of names, in the order of the logits), `metrics` (a JSON object of measured
figures), `license` (as the Hub spells it) and `note` (what the licence does not say, of the data for one).

Files in the folder `weights` beside this one, named as networks are, come with the package:
`create_model(NAME, pretrained=True)`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import yaml

from gsanet.models.fit import layer_names

FOLDER = Path(__file__).parent / "weights"
# What evaluation here resizes with.
INTERPOLATION = "bilinear"
# Options that train a network and are no part of what it is.
TRAINING = {"drop_rate", "drop_path_rate", "zero_init_last", "conv_init"}


@dataclass(frozen=True)
class Description:
    """What a file of weights says of itself; what it does not say is empty."""

    file: Path
    recipe: str = ""
    classes: list[str] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    license: str = ""
    note: str = ""

    @cached_property
    def values(self) -> dict[str, Any]:
        """The recipe's."""
        return yaml.safe_load(self.recipe) if self.recipe else {}

    @property
    def model(self) -> str:
        """The name of the network."""
        return self.values.get("model", "")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the network that decide its shape."""
        options = self.values.get("model_kwargs") or {}
        return {name: value for name, value in options.items() if name not in TRAINING}

    def metadata(self) -> dict[str, str]:
        """As they are written into the file."""
        entries = {
            "format": "pt",
            "recipe": self.recipe,
            "classes": json.dumps(self.classes) if self.classes else "",
            "metrics": json.dumps(self.metrics) if self.metrics else "",
            "license": self.license,
            "note": self.note,
        }
        return {name: text for name, text in entries.items() if text}

    def config(self) -> dict[str, Any]:
        """What it adds to timm's `pretrained_cfg` of the network."""
        values, data = self.values, self.values.get("data", {})
        found: dict[str, Any] = {"file": str(self.file), "interpolation": INTERPOLATION}
        if "img_size" in values:
            size = values["img_size"]
            found["input_size"] = (3, *((size, size) if isinstance(size, int) else size))
        found |= {key: tuple(data[key]) for key in ("mean", "std") if key in data}
        found |= {"crop_pct": data["crop_pct"]} if "crop_pct" in data else {}
        if self.classes:
            found |= {"num_classes": len(self.classes), "label_names": tuple(self.classes)}
        found |= {"license": self.license} if self.license else {}
        # timm has no entries for these, and refuses entries that it does not know.
        notes = {"metrics": json.dumps(self.metrics), "recipe": self.recipe, "licence note": self.note}
        found["notes"] = tuple(f"{name}: {text}" for name, text in notes.items() if text not in ("", "{}"))
        return {**found, "description": self.summary} if self.metrics else found

    @property
    def summary(self) -> str:
        """One line on what the weights are worth."""
        top1, on = self.metrics.get("top1"), self.metrics.get("on", "unknown images")
        return "" if top1 is None else f"{top1:.2f} % top-1 on {on}"


def read_description(file: str | Path) -> Description:
    """What a safetensors file says of itself; its tensors are not read."""
    file = Path(file)
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give a safetensors file, or a run directory with --run")
    if not file.exists():
        raise FileNotFoundError(f"there is no file of weights {file}")
    try:
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
    except safetensors.SafetensorError:
        raise ValueError(f"{file} is not a safetensors file, the only kind of weights that is read") from None
    try:
        lists = {name: json.loads(metadata[name]) for name in ("classes", "metrics") if name in metadata}
    except ValueError:
        raise ValueError(f"{file}: classes and metrics in its metadata must be JSON") from None
    texts = {name: metadata[name] for name in ("recipe", "license", "note") if name in metadata}
    return Description(file, **lists, **texts)


def read_shapes(file: str | Path) -> dict[str, Sequence[int]]:
    """The shapes of a safetensors file's tensors, which are not read."""
    with safetensors.safe_open(file, "pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (no dictionary)


def count_classes(shapes: Mapping[str, Sequence[int]], classifier: str | Sequence[str] | None) -> int | None:
    """The number of classes that weights of these shapes have a head for; None if they have no head."""
    heads = [f"{name}.weight" for name in layer_names(classifier)]
    return next((shapes[name][0] for name in heads if name in shapes), None)


def shipped_file(name: str) -> Path | None:
    """The weights of a network that come with this package."""
    file = FOLDER / f"{name}.safetensors"
    return file if file.is_file() else None


def shipped_weights(name: str) -> Path:
    """The same, refused where there is none."""
    if (file := shipped_file(name)) is None:
        others = ", ".join(sorted(each.stem for each in FOLDER.glob("*.safetensors")))
        raise ValueError(
            f"no weights of {name} come with this package{f' (of {others} they do)' if others else ''}: "
            "say where they are, a safetensors file, a folder or a repository on the Hub"
        )
    return file


def with_shipped(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The `pretrained_cfg` of networks, by name, with what the weights in this package say of themselves."""
    return {
        name: {**config, **(read_description(file).config() if (file := shipped_file(name)) else {})}
        for name, config in configs.items()
    }
