"""What the recipe of the tables was chosen by: GSA-ResNet-38 and its twin on training images that were held out."""

from dataclasses import dataclass
from statistics import mean

from gsanet.paper.matrix import matrix
from gsanet.paper.results import Results, Run
from gsanet.paper.settings import portable_settings, training

CONV, GSA = "choice-conv38-", "choice-gsa38-"


@dataclass(frozen=True)
class Choice:
    """Both networks under one recipe, or GSA alone if it is the module that changes; None where there is no run.

    Args:
        name: What the names of the runs end with.
        network: The GSA network.
        training: The recipe, and what was set over it.
        epochs: How often each image was seen.
        images: How many there were to learn from.
        conv: The run with convolutions.
        gsa: The run with global self-attention.
        alone: Whether there is no run with convolutions to be made.
    """

    name: str
    network: str
    training: str
    epochs: int
    images: int
    conv: Run | None
    gsa: Run | None
    alone: bool

    @property
    def mean(self) -> float | None:
        """What recipes are chosen by: the mean of the two accuracies."""
        return mean((self.conv.top1, self.gsa.top1)) if self.conv and self.gsa else None

    @property
    def difference(self) -> float | None:
        """Points of top-1 that GSA is ahead."""
        return self.gsa.top1 - self.conv.top1 if self.conv and self.gsa else None


def choices(results: Results) -> list[Choice]:
    """All recipes that were tried, in the order of the matrix."""
    runs = {run.run: run for run in results.runs}
    found = []
    for name in (name.removeprefix(GSA) for name in matrix() if name.startswith(GSA)):
        experiment = matrix()[GSA + name]
        settings = portable_settings(experiment.recipe)
        settings["data"] = {key: value for key, value in settings["data"].items() if key != "holdout"}
        found.append(
            Choice(
                name=name,
                network=experiment.recipe.model,
                training=training(experiment.recipe_name, settings),
                epochs=experiment.recipe.epochs or 0,
                images=experiment.train_images - experiment.held_out,
                conv=runs.get(CONV + name),
                gsa=runs.get(GSA + name),
                alone=CONV + name not in matrix(),
            )
        )
    return found


def training_loss(run: Run) -> float | None:
    """The mean over the last epochs, since the evaluation before the last."""
    return run.curve[-1].get("train_loss") if run.curve else None
