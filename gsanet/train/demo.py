"""The quickstart: a GSA network and its convolutional twin on the same digits, side by side; then a photograph.

The photograph is scikit-learn's; what it shows is said by the network whose weights come with the package.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from gsanet.explain.image import explain_image, place_of
from gsanet.models import count_flops, count_parameters
from gsanet.predict import Prediction, load_classifier, predict_images
from gsanet.train.data.shards import Shards
from gsanet.train.data.sources import open_digits
from gsanet.train.engine import make_model, train
from gsanet.train.recipe import load_recipe
from gsanet.train.report import draw_curves
from gsanet.train.run_directory import RECIPE

PAIR = ("gsa_resnet26_tiny", "conv_resnet26_tiny")
ROOF = (320, 190)  # a pixel of the photograph


@dataclass(frozen=True)
class DemoRow:
    """One network: its size, operations for one image, and what it learned."""

    model: str
    params: int
    flops: int
    top1: float
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Both networks, the picture of their curves (or why there is none), and a folder of scans to try them on."""

    rows: list[DemoRow]
    curves: str
    scans: Path


def train_pair(out: Path) -> Pair:
    """Train both with the recipe `quickstart`, each in its own run directory below `out`.

    The runs of an earlier demo there are replaced. Beside them, `scans` holds an image of each digit that they were not
    trained on.
    """
    # Operations this small gain little from more threads, and on a busy machine they wait for one another.
    torch.set_num_threads(1)
    rows = []
    for name in PAIR:
        recipe = load_recipe("quickstart", {"model": name})
        run = out / name
        if (run / RECIPE).exists():
            shutil.rmtree(run)
        result = train(recipe, run)
        if result.stopped_by:
            raise KeyboardInterrupt
        top1, seconds = result.progress.evaluation["top1"], result.progress.seconds
        network = make_model(recipe, num_classes=10)
        rows.append(DemoRow(name, count_parameters(network), count_flops(network), top1, seconds))
    picture = out / "curves.png"
    curves = draw_curves({name: out / name for name in PAIR}, picture) or str(picture)
    return Pair(rows, curves, save_scans(out / "scans"))


def save_scans(folder: Path) -> Path:
    """Save the first held-out scan of each digit as an image, `0.png` to `9.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    for digit, image in first_scans().items():
        image.save(folder / f"{digit}.png")
    return folder


def first_scans() -> dict[int, Image.Image]:
    """The first held-out scan of each digit."""
    held_out = open_digits(train=False).val
    assert not isinstance(held_out, Shards)
    found: dict[int, Image.Image] = {}
    for index in range(len(held_out)):
        image, digit = held_out.open(index)
        found.setdefault(digit, image)
    return found


@dataclass(frozen=True)
class Look:
    """What the shipped network takes a photograph for, and the picture of where one of its pixels looks."""

    prediction: Prediction
    module: str
    picture: Path


def look_at_photograph(out: Path) -> Look:
    """Predict and explain a photograph, saved in `out` with the picture of where the network looked."""
    from sklearn.datasets import load_sample_image

    from gsanet.explain.figure import draw

    out.mkdir(parents=True, exist_ok=True)
    photograph, picture = out / "photograph.png", out / "photograph-explain.png"
    image = Image.fromarray(load_sample_image("china.jpg"))
    image.save(photograph)
    classifier = load_classifier()
    found = explain_image(classifier, image, ROOF, stage=2)
    draw(found, picture)
    (prediction,) = predict_images(classifier, [photograph], top=3)
    return Look(prediction, place_of(found.explanation.module), picture)
