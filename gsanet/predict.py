"""Trained networks on a user's images: what `gsanet predict` does, and `gsanet explain` starts from."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from gsanet.devices import default_device
from gsanet.images import UnreadableImageError, read_image
from gsanet.layers.relative import TABLES
from gsanet.models.described import read_description, shipped_file
from gsanet.models.registry import check_name
from gsanet.train.data import DataSettings
from gsanet.train.data.augment import evaluation_views, render
from gsanet.train.evaluate_weights import weights_recipe
from gsanet.train.run_network import TrainedNetwork, load_network, load_run_network

DEFAULT = "gsa_resnet35_tiny"
HOW_TO_GET_ONE = (
    "say which network: --run DIR of a training run, or --model NAME and --weights FILE. "
    "To get one in a minute: `gsanet demo`, then --run runs/quickstart/gsa_resnet26_tiny"
)


@dataclass(frozen=True)
class View:
    """What a network sees of an image: it is resized, then the middle is cut out.

    Attributes:
        size: Height and width of the image.
        resized: Height and width that it is resized to.
        offset: Top and left of the network's input in the resized image.
        input_size: Height and width of the network's input.
    """

    size: tuple[int, int]
    resized: tuple[int, int]
    offset: tuple[int, int]
    input_size: tuple[int, int]

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of what is seen, in pixels of the image."""
        top, left, bottom, right = (
            edge * self.size[axis] / self.resized[axis]
            for edges in (
                self.offset,
                [start + length for start, length in zip(self.offset, self.input_size, strict=True)],
            )
            for axis, edge in enumerate(edges)
        )
        return left, top, right, bottom

    def locate(self, column: int, row: int) -> tuple[float, float]:
        """Where the middle of a pixel of the image lies in the network's input, down and along, in its pixels."""
        height, width = self.size
        if not (0 <= column < width and 0 <= row < height):
            raise ValueError(
                f"the pixel {column},{row} lies outside of the image: X goes from 0 to {width - 1} to the right, "
                f"Y from 0 to {height - 1} down"
            )
        left, top, right, bottom = self.box
        if not (left <= column + 0.5 < right and top <= row + 0.5 < bottom):
            # A pixel is seen if its middle is.
            first_x, last_x, first_y, last_y = (
                math.ceil(edge - 0.5) - is_end for edge, is_end in ((left, 0), (right, 1), (top, 0), (bottom, 1))
            )
            raise ValueError(
                f"the pixel {column},{row} lies outside of what the network sees of the image: "
                f"X from {first_x} to {last_x} and Y from {first_y} to {last_y}"
            )
        down, along = (
            (place + 0.5) * self.resized[axis] / self.size[axis] - self.offset[axis]
            for axis, place in enumerate((row, column))
        )
        return down, along


@dataclass(frozen=True)
class Transform:
    """From an image to the network's input, exactly as in evaluation during training."""

    settings: DataSettings

    def view(self, image: Image.Image) -> View:
        """Which part of an image the network sees."""
        views = evaluation_views(self.settings, np.array([[image.height, image.width]]))
        resized, offset = (tuple(rows[0].tolist()) for rows in (views.resized, views.offset))
        return View((image.height, image.width), resized, offset, self.settings.img_size)

    def __call__(self, image: Image.Image) -> Tensor:
        """An RGB image as float32, (3, height, width), normalised."""
        views = evaluation_views(self.settings, np.array([[image.height, image.width]]))
        pixels = render(image, views, 0, self.settings.img_size) / 255
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.settings.mean, self.settings.std))
        return (pixels - mean) / std


@dataclass(frozen=True)
class Guess:
    """One class: its number, its name (the number, where no name is known) and its probability from 0 to 1."""

    label: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a network says of one image, the likeliest class first; or why it says nothing."""

    image: str
    guesses: tuple[Guess, ...] = ()
    note: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """With the keys `image`, `top` (a list of `class`, `name`, `probability`), `note` and `error` (or null)."""
        top = [{"class": guess.label, "name": guess.name, "probability": guess.probability} for guess in self.guesses]
        return {"image": self.image, "top": top, "note": self.note or None, "error": self.error or None}


@dataclass(frozen=True)
class Classifier:
    """A trained network with all that it takes to use it.

    Attributes:
        model: In evaluation mode.
        transform: From an image to its input.
        class_names: In the order of its outputs; empty where they are not known.
        name: The network's, as in `gsanet models`.
    """

    model: nn.Module
    transform: Transform
    class_names: tuple[str, ...]
    name: str

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @property
    def num_classes(self) -> int:
        """How many classes it tells apart."""
        model: Any = self.model
        return model.num_classes

    def predict(self, images: Sequence[Image.Image], top: int = 5) -> list[tuple[Guess, ...]]:
        """The likeliest classes of each RGB image, the likeliest first."""
        return self.classify([self.transform(image) for image in images], top)

    def classify(self, inputs: Sequence[Tensor], top: int = 5) -> list[tuple[Guess, ...]]:
        """The same for images that `transform` has been applied to."""
        found = self.try_classify(inputs, top)
        if not all(found):
            raise ValueError(self.overflow)
        return found

    @property
    def overflow(self) -> str:
        """What to say of an image without a finite output."""
        return f"the outputs of {self.name} are not finite numbers: train it for longer, or more gently"

    @torch.inference_mode()
    def try_classify(self, inputs: Sequence[Tensor], top: int = 5) -> list[tuple[Guess, ...]]:
        """The same, with nothing for an image whose output is not finite: now and then one overflows."""
        if top < 1:
            raise ValueError(f"top must be 1 or more, got {top}")
        if not inputs:
            return []
        probabilities = self.model(torch.stack(list(inputs)).to(self.device)).float().softmax(1).cpu()
        finite = probabilities.isfinite().all(1).tolist()
        best = probabilities.topk(min(top, probabilities.shape[1]))
        rows = zip(finite, best.indices.tolist(), best.values.tolist(), strict=True)
        return [self._guesses(labels, values) if is_finite else () for is_finite, labels, values in rows]

    def _guesses(self, labels: list[int], probabilities: list[float]) -> tuple[Guess, ...]:
        names = [self.class_names[label] if self.class_names else str(label) for label in labels]
        return tuple(map(Guess, labels, names, probabilities))


def load_classifier(
    run: str | Path | None = None,
    model: str = "",
    weights: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> Classifier:
    """Load a network with its weights, preprocessing and class names.

    Args:
        run: A run directory of `gsanet train`; its best weights are taken, or the last while there are no best ones.
        model: Without a run: the network's name. Not needed for weights that say it themselves.
        weights: Without a run: a safetensors file. Where its metadata say what it is (see `gsanet.models.described`),
            they are followed; else the network's own settings are taken, and classes are numbers. Without weights:
            those that come with this package, of `gsa_resnet35_tiny` where no network is named.
        overrides: Values set over the recipe's, such as `img_size` or `data.mean`.
        device: Where to. Default: the GPU if there is one.
    """
    if run is not None and (model or weights is not None):
        raise ValueError("give either --run DIR, or --model NAME and --weights FILE, not both")
    try:
        if run is not None:
            found = _load_run(Path(run), overrides)
        else:
            source = _shipped(model) if weights is None else Path(weights)
            recipe = weights_recipe(source, model, overrides or {})
            found = load_network(recipe, source, read_description(source).classes)
    except ValueError as error:
        if any(table in str(error) for table in TABLES):
            if "img_size" in (overrides or {}):
                advice = "they were trained at another image size than img_size says"
            else:
                advice = "if they were trained at another image size, say so: --set img_size=64"
            raise ValueError(f"{error}; {advice}") from None
        raise
    network = found.model.to(device or default_device())
    return Classifier(network, Transform(found.recipe.data_settings), tuple(found.class_names), found.recipe.model)


def predict_images(
    classifier: Classifier, sources: Sequence[str | Path], top: int = 5, batch_size: int = 32
) -> Iterator[Prediction]:
    """Predict files and addresses one after the other, in their order; of one without an answer it is said why."""
    for start in range(0, len(sources), batch_size):
        found: list[Prediction] = []
        inputs: list[Tensor] = []
        for source in map(str, sources[start : start + batch_size]):
            try:
                picture = read_image(source)
            except UnreadableImageError as error:
                found.append(Prediction(source, error=str(error)))
                continue
            found.append(Prediction(source, note=picture.note))
            inputs.append(classifier.transform(picture.image))  # at once: a batch of large images would fill the memory
        guesses = iter(classifier.try_classify(inputs, top))
        for each in found:
            if not each.error:
                each = replace(each, guesses=next(guesses))
                if not each.guesses:
                    each = replace(each, error=f"{each.image}: {classifier.overflow}")
            yield each


def _load_run(run: Path, overrides: Mapping[str, Any] | None) -> TrainedNetwork:
    """A run in progress will do: its last weights, until it has best ones."""
    if not run.exists():
        raise FileNotFoundError(f"there is no run directory {run}: {HOW_TO_GET_ONE}")
    return load_run_network(run, "any", overrides)


def _shipped(model: str) -> Path:
    """The weights that come with this package."""
    check_name(model or DEFAULT)
    if (file := shipped_file(model or DEFAULT)) is None:
        raise ValueError(f"no weights{f' of {model}' if model else ''} come with this package: {HOW_TO_GET_ONE}")
    return file
