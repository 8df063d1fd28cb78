"""A trained network with what one needs to use it elsewhere: classes and preprocessing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gsanet.models.described import count_classes
from gsanet.train import checkpoint
from gsanet.train.engine import make_model
from gsanet.train.recipe import Recipe
from gsanet.train.run_directory import CLASSES, read_run
from gsanet.train.weights import load_exactly, read_weights


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with its weights, in evaluation mode.

    Attributes:
        model: Its `pretrained_cfg` says how images were prepared.
        class_names: In the order of its outputs; empty where they are not known.
        recipe: What made it.
    """

    model: nn.Module
    class_names: list[str]
    recipe: Recipe


def load_run_network(run: Path, which: str = "best", overrides: Mapping[str, Any] | None = None) -> TrainedNetwork:
    """Load the network that a run trained.

    Args:
        run: The run directory.
        which: `"best"` or `"last"` weights. A run that has not evaluated yet has no best ones; `"any"` then takes the
            last.
        overrides: Values set over the recipe's, such as `img_size` or `data.mean`.
    """
    recipe = read_run(run, overrides)
    places = [run / name for name in (("best", "last") if which == "any" else (which,))]
    source = next((place for place in places if checkpoint.exists(place)), None)
    if source is None:
        raise FileNotFoundError(f"{run} has no {'' if which == 'any' else f'{which!r} '}weights yet")
    file = run / CLASSES
    return load_network(recipe, source, json.loads(file.read_text()) if file.exists() else [])


def load_network(recipe: Recipe, source: Path, class_names: Sequence[str]) -> TrainedNetwork:
    """Load weights that fit a recipe's network as it is.

    Args:
        recipe: Of the network and its images.
        source: A safetensors file, or a checkpoint directory.
        class_names: In the order of the network's outputs. Empty: their number is that of the weights' head.
    """
    num_classes = len(class_names) or _count_classes(recipe, source)
    model: Any = make_model(recipe, num_classes)
    load_exactly(model, source)
    data = recipe.data_settings
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "input_size": (len(data.mean), *recipe.image_size),
        "num_classes": num_classes,
        "mean": data.mean,
        "std": data.std,
        "crop_pct": data.crop_pct,
    }
    return TrainedNetwork(model.eval(), list(class_names), recipe)


def _count_classes(recipe: Recipe, source: Path) -> int:
    """The number of classes, from the shape of the classifier."""
    settings: Any = make_model(recipe, 0).pretrained_cfg
    shapes = {name: tensor.shape for name, tensor in read_weights(source).items()}
    if (count := count_classes(shapes, settings["classifier"])) is None:
        raise ValueError(f"the weights of {source} do not fit the model: they have no head for classes")
    return count
