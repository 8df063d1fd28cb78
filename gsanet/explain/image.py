"""From a pixel of a user's image to the module's map that covers it."""

import re
from dataclasses import dataclass

from PIL import Image
from torch import nn

from gsanet.explain.maps import Explanation, explain, gsa_modules
from gsanet.models import list_models
from gsanet.predict import Classifier, Guess, View

USUAL_STAGE = 3  # its maps are fine enough to see by, and its features no longer edges


@dataclass(frozen=True, eq=False)
class ImageExplanation:
    """An explanation and the image that it is about.

    Attributes:
        explanation: The weights.
        image: As it was read, RGB and upright.
        at: The pixel of the image, (X to the right, Y down).
        view: Which part of the image the network sees.
        guess: The likeliest class.
        network: The network's name.
    """

    explanation: Explanation
    image: Image.Image
    at: tuple[int, int]
    view: View
    guess: Guess
    network: str


def explain_image(
    classifier: Classifier,
    image: Image.Image,
    at: tuple[int, int],
    stage: int | None = None,
    block: int | None = None,
) -> ImageExplanation:
    """Explain what one GSA module does at one pixel of an image.

    Args:
        classifier: A trained network.
        image: RGB.
        at: The pixel of the image, (X to the right, Y down), counted from 0.
        stage: Which stage, counted from 1. Default: the third, or that of the last GSA module if there is none in it.
        block: Which of its blocks, counted from 1. Default: the last.
    """
    module = choose_module(classifier.model, classifier.name, stage, block)
    view = classifier.transform.view(image)
    place = view.locate(*at)
    seen = classifier.transform(image)[None].to(classifier.device)
    explanation = explain(classifier.model, seen, place, module)
    (guesses,) = classifier.predict([image], top=1)
    return ImageExplanation(explanation, image, at, view, guesses[0], classifier.name)


def choose_module(model: nn.Module, network: str, stage: int | None = None, block: int | None = None) -> str:
    """The name of the GSA module in a block of a network; see `explain_image` for the defaults."""
    places = gsa_places(model)
    if not places:
        works = ", ".join(name for name in list_models("gsa_*"))
        raise ValueError(f"{network} has no GSA modules to explain; these networks have: {works}")
    stages = sorted({place[0] for place in places})
    if stage is None:
        stage = USUAL_STAGE if USUAL_STAGE in stages else stages[-1]
    if stage not in stages:
        raise ValueError(f"stage {stage} of {network} has no GSA modules; those with some: {_listed(stages)}")
    blocks = sorted(place[1] for place in places if place[0] == stage)
    if block is not None and block not in blocks:
        raise ValueError(f"stage {stage} of {network} has no GSA module in block {block}: it has {_listed(blocks)}")
    return places[stage, blocks[-1] if block is None else block]


def gsa_places(model: nn.Module) -> dict[tuple[int, int], str]:
    """The names of the GSA modules by stage and block, both counted from 1, in the order of the network."""
    places = {}
    for name in gsa_modules(model):
        if found := re.match(r"stages\.(\d+)\.(\d+)\.", name):
            places[int(found[1]) + 1, int(found[2]) + 1] = name
    return places


def place_of(module: str) -> str:
    """A module's stage and block in words."""
    found = re.search(r"stages\.(\d+)\.(\d+)\.", module)
    return f"stage {int(found[1]) + 1}, block {int(found[2]) + 1}" if found else module


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
