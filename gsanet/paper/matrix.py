"""The experiments that stand for the paper's: `matrix.yaml`, read and checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import torch
import yaml

from gsanet.models import count_flops
from gsanet.paper import studies  # noqa: F401 (it registers its networks)
from gsanet.paper.printed import Network, printed_table, printed_tables
from gsanet.paper.results import plain_network
from gsanet.train.engine import make_model
from gsanet.train.recipe import Recipe, load_recipe
from gsanet.words import suggest

TABLES = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Experiment:
    """One run.

    Args:
        name: Of the run, its directory and its file of results.
        recipe_name: As in `gsanet recipes`.
        dataset: What it is trained on.
        overrides: Values set over the recipe's.
        weights: The name of the run whose weights it starts from, or "".
        question: What it is made for, if not for the paper's tables.
        only: The tables that it stands in, if not in all that have a row of its network.
        train_images: Of the data set.
        classes: Of the data set.
        images_per_second: About how fast it trains, where its operations do not say; 0: not known.
    """

    name: str
    recipe_name: str
    dataset: str
    overrides: dict[str, Any] = field(hash=False)
    weights: str
    question: str
    only: tuple[int, ...]
    train_images: int
    classes: int
    images_per_second: float = 0.0

    @cached_property
    def recipe(self) -> Recipe:
        """What is trained, without the places of data and weights, which are a machine's."""
        return load_recipe(self.recipe_name, self.overrides)

    @property
    def network(self) -> Network:
        """Which network it is, whatever the size of its images."""
        return plain_network(self.recipe.model, self.recipe.model_kwargs)

    @property
    def tables(self) -> tuple[int, ...]:
        """The tables of the paper that have a row of its network; of those, only Table 6 prints CIFAR-100."""
        if self.recipe.data_settings.holdout or self.question:  # it is there to choose a recipe, or goes past the paper
            return ()
        return tuple(
            number
            for number in TABLES
            if any(row.network == self.network for row in printed_tables()[number].rows)
            and (self.dataset != "cifar100" or number == 6)
            and (not self.only or number in self.only)
        )

    @property
    def rows(self) -> list[str]:
        """The keys of the rows that it stands for; none if these are all of its network."""
        if not self.only:
            return []
        return [row.key for table in self.tables for row in printed_table(table).rows if row.network == self.network]

    @property
    def held_out(self) -> int:
        """How many of the training images it is evaluated on."""
        return round(self.recipe.data_settings.holdout * self.train_images)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return (self.train_images - self.held_out) // self.recipe.batch_size

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.recipe.steps or (self.recipe.epochs or 0) * self.steps_per_epoch

    @cached_property
    def flops(self) -> int:
        """Operations of one image's forward pass, at the size and the number of classes of the run."""
        with torch.device("meta"):
            return count_flops(make_model(self.recipe, self.classes), self.recipe.image_size)


@cache
def matrix() -> dict[str, Experiment]:
    """All experiments by name, in the order in which to make them: the second seeds come last."""
    return read_matrix(files("gsanet.paper").joinpath("matrix.yaml").read_text(encoding="utf-8"))


def read_matrix(text: str) -> dict[str, Experiment]:
    """Experiments from YAML, as `matrix.yaml` explains it."""
    content = yaml.safe_load(text)
    first: list[Experiment] = []
    others: list[Experiment] = []
    for name, run in content["runs"].items():
        kind = content["kinds"][run["kind"]]
        for seed in run.get("seeds", [0]):
            experiment = Experiment(
                name=name if seed == 0 else f"{name}-seed{seed}",
                recipe_name=kind["recipe"],
                dataset=kind["dataset"],
                overrides={**kind.get("set", {}), "model": run["model"], "seed": seed, **run.get("set", {})},
                weights=run.get("weights", ""),
                question=kind.get("question", ""),
                only=tuple(kind.get("tables", ())),
                **content["datasets"][kind["dataset"]],
                images_per_second=run.get("images_per_second", 0.0),
            )
            (others if seed else first).append(experiment)
    found = {experiment.name: experiment for experiment in [*first, *others]}
    for experiment in found.values():
        if experiment.weights and experiment.weights not in found:
            raise ValueError(f"{experiment.name} starts from the weights of {experiment.weights}, which is no run")
    return found


def choose(names: Sequence[str], table: int | None = None) -> list[Experiment]:
    """Experiments by name or pattern (such as `cifar100-*`), in this order, then those of a table.

    What one pattern names, and a table, is in the order of the matrix.
    """
    known = matrix()
    found: dict[str, Experiment] = {}
    for name in names:
        named = {each: experiment for each, experiment in known.items() if fnmatchcase(each, name)}
        if not named:
            near = suggest(name, known, otherwise="`gsanet paper run --list` shows them")
            raise ValueError(f"unknown run {name!r}: {near}")
        found |= named
    found |= {name: experiment for name, experiment in known.items() if table and table in experiment.tables}
    return list(found.values())
