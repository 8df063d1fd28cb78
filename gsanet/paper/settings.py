"""A recipe as results keep it, and what a run changed of the recipe that it names."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from gsanet.train.recipe import SECTIONS, Recipe, load_recipe

# What a machine decides, and no result depends on.
PLACES = ("weights", "compile", "cuda_graphs", "checkpoint_minutes", "checkpoint_steps", "timeout_minutes")
DATA_PLACES = ("path", "workers", "in_memory")
# What is trained, and how long: results say so by other words. And what is looked at on the way, or fits the weights.
SAID_ELSEWHERE = ("model", "model_kwargs", "seed", "epochs", "steps")
NOT_SAID = ("evaluate_epochs", "data.mean", "data.std")


def portable_settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe without what a machine decides."""
    values = {key: value for key, value in yaml.safe_load(recipe.to_yaml()).items() if key not in PLACES}
    values["data"] = {key: value for key, value in values.get("data", {}).items() if key not in DATA_PLACES}
    return values


def changes(recipe_name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, as `--set` takes them, that a run has over the recipe that it names."""
    named = _named(recipe_name)
    return {key: value for key, value in _flat(settings) if key not in named or named[key] != value}


def training(recipe_name: str, settings: Mapping[str, Any]) -> str:
    """How a network was trained, in words: the recipe, and what was set over it."""
    try:
        changed = changes(recipe_name, settings)
    except (ValueError, OSError):  # a recipe that this machine does not have
        return recipe_name
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in changed.items()
        if key not in NOT_SAID and key.split(".")[0] not in SAID_ELSEWHERE
    ]
    return f"{recipe_name} with {', '.join(words)}" if words else recipe_name


@cache
def _named(recipe_name: str) -> dict[str, Any]:
    return dict(_flat(portable_settings(load_recipe(recipe_name))))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in SECTIONS:
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value
