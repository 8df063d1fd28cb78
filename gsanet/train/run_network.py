"""The trained network of a run, with what one needs to use it elsewhere: classes and preprocessing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gsanet.train import checkpoint
from gsanet.train.engine import make_model
from gsanet.train.recipe import Recipe
from gsanet.train.run_directory import CLASSES, read_run
from gsanet.train.weights import load_exactly


@dataclass(frozen=True)
class RunNetwork:
    """A network with the weights of a run; its `pretrained_cfg` says how the run prepared images."""

    model: nn.Module
    class_names: list[str]
    recipe: Recipe


def load_run_network(run: Path, which: str = "best") -> RunNetwork:
    """Load the network that a run trained, in evaluation mode.

    Args:
        run: The run directory.
        which: `"best"` or `"last"` weights. A run that has not evaluated yet has no best ones.
    """
    recipe = read_run(run)
    if not checkpoint.exists(run / which):
        raise FileNotFoundError(f"{run} has no {which!r} weights yet")
    class_names = json.loads((run / CLASSES).read_text())
    model: Any = make_model(recipe, len(class_names))
    load_exactly(model, run / which)
    data = recipe.data_settings
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "input_size": (len(data.mean), *recipe.image_size),
        "num_classes": len(class_names),
        "mean": data.mean,
        "std": data.std,
        "crop_pct": data.crop_pct,
    }
    return RunNetwork(model.eval(), class_names, recipe)
