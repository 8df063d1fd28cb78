"""Evaluate stored weights: what `gsanet eval` does."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gsanet.models import create_model
from gsanet.models.described import read_description
from gsanet.train.data import open_data
from gsanet.train.data.damage import skipped_words
from gsanet.train.engine import make_accelerator, make_model
from gsanet.train.evaluate import Evaluation, evaluate
from gsanet.train.recipe import Recipe, make_recipe
from gsanet.train.weights import load_exactly


def evaluate_weights(recipe: Recipe, weights: Path, report: Callable[[str], None] = lambda line: None) -> Evaluation:
    """Evaluate weights on the held-out images, at the recipe's image size.

    Args:
        recipe: Of the network and the data; how it was trained does not matter.
        weights: A safetensors file, or a checkpoint directory.
        report: Called with a line on images that could not be decoded, which are not counted.
    """
    accelerator = make_accelerator(recipe)
    data = open_data(
        recipe.data_path,
        recipe.data_settings,
        batch_size=recipe.batch_size // recipe.micro_steps(accelerator.num_processes),
        seed=recipe.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        device=accelerator.device,
        train=False,
    )
    model = make_model(recipe, data.num_classes)
    load_exactly(model, weights)
    model.to(accelerator.device).to(memory_format=torch.channels_last)
    found = evaluate(model, data.val, accelerator, recipe.precision_on(accelerator.device))
    if skipped := skipped_words(data.bad_files()):
        report(skipped)
    return found


def model_recipe(model: str, overrides: Mapping[str, Any]) -> Recipe:
    """What evaluation needs to know, as the network's own settings say it."""
    settings: Any = create_model(model, num_classes=0).pretrained_cfg
    values = {
        "model": model,
        "img_size": list(settings["input_size"][1:]),
        "batch_size": 256,
        # Not used in evaluation, but a recipe has them.
        "epochs": 1,
        "lr": 0.1,
        "data": {key: settings[key] for key in ("mean", "std", "crop_pct")},
    }
    return make_recipe(values, overrides)


def weights_recipe(file: Path, model: str, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe of a file of weights: its own, or what the network's own settings say.

    Args:
        file: Safetensors; their metadata may hold a recipe (see `gsanet.models.described`).
        model: The name of the network. Not needed for weights that say it themselves.
        overrides: Values set over the recipe's.
    """
    described = read_description(file)
    if described.model and model in ("", described.model):
        # Images that were held out to choose a recipe are no test.
        return make_recipe(described.values, {"data.holdout": 0.0, **overrides})
    if described.model:
        raise ValueError(f"{file} holds weights of {described.model}, not of {model}")
    if not model:
        raise ValueError(f"{file} does not say which network it belongs to: give --model NAME (`gsanet models`)")
    return model_recipe(model, overrides)
