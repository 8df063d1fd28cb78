"""How well a network holds up when images are changed: its accuracy under each change."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from gsanet.inference import fuse_for_inference
from gsanet.models.described import FOLDER, read_description, shipped_file
from gsanet.predict import Classifier, load_classifier
from gsanet.stress.changes import CHANGES, Change
from gsanet.train.data import Data, open_data
from gsanet.words import suggest

BATCH = 64  # a multiple of the four directions that shifts take in turn


@dataclass(frozen=True)
class Accuracy:
    """Of a network under one change.

    Attributes:
        top1: In per cent.
        kept: The share of the accuracy on unchanged images, from 0 to 1 or a little above; None where that was 0.
        overflowed: Images whose output is not finite: they count as wrong.
    """

    top1: float
    kept: float | None
    overflowed: int


@dataclass(frozen=True)
class Stressed:
    """What was found of one network.

    Attributes:
        network: Its name, as in `gsanet models`.
        images: How many it saw.
        accuracies: By the name of the change, `unchanged` first.
    """

    network: str
    images: int
    accuracies: Mapping[str, Accuracy]

    @property
    def standard_error(self) -> float:
        """The largest of its accuracies', in points: how far another choice of images may take them."""
        shares = (found.top1 / 100 for found in self.accuracies.values())
        return max(100 * math.sqrt(share * (1 - share) / self.images) for share in shares)

    def to_json(self) -> dict[str, Any]:
        """With the keys `network`, `images` and `changes` (a list of `change`, `top1`, `kept`, `overflowed`)."""
        changes = [{"change": name, **asdict(found)} for name, found in self.accuracies.items()]
        return {"network": self.network, "images": self.images, "changes": changes}


def choose_changes(names: Sequence[str] = ()) -> dict[str, Change]:
    """Changes by their names, all without any; `unchanged` is always the first of them."""
    for name in names:
        if name not in CHANGES:
            raise ValueError(f"unknown change {name!r}: {suggest(name, CHANGES)}")
    wanted = {"unchanged", *(names or CHANGES)}
    return {name: change for name, change in CHANGES.items() if name in wanted}


def load_any(source: str, device: str | None = None) -> Classifier:
    """A network from a run directory, a file of `gsanet pack`, or by its name, with the weights in this package."""
    path = Path(source).expanduser()
    if path.is_dir():
        return load_classifier(run=path, device=device)
    if path.exists():
        if not read_description(path).model:
            raise ValueError(f"{source} does not say which network it belongs to, as files of `gsanet pack` do")
        return load_classifier(weights=path, device=device)
    if shipped_file(source):
        return load_classifier(model=source, device=device)
    names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.safetensors")))
    raise FileNotFoundError(
        f"{source} is no run directory, no file, and no network whose weights come with this package ({names})"
    )


def open_images(classifier: Classifier, data: str, most: int | None = None) -> Data:
    """Held-out images as the network's own evaluation sees them, but in [0, 1]: not normalised.

    Args:
        classifier: For its image size, and its device.
        data: As `gsanet.train.data.open_data` takes it.
        most: So many of them at most, the same ones for every network. Default: all.
    """
    # Runs that held out training images, to choose a recipe, would see other images than the rest.
    settings = replace(classifier.transform.settings, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), holdout=0.0)
    found = open_data(data, settings, batch_size=BATCH, seed=0, device=classifier.device, train=False, most=most)
    if found.num_classes != classifier.num_classes:
        raise ValueError(
            f"{classifier.name} tells {classifier.num_classes} classes apart, but {data} has {found.num_classes}"
        )
    return found


@torch.inference_mode()
def measure(
    classifier: Classifier, batches: Iterable[tuple[Tensor, Tensor]], changes: Mapping[str, Change]
) -> Stressed:
    """Count how many images a network gets right under each change.

    Args:
        classifier: The network; it computes in float32.
        batches: Of images in [0, 1] and labels, on its device, such as those of `open_images`.
        changes: By name, with `unchanged` among them; see `choose_changes`.
    """
    model = fuse_for_inference(classifier.model).to(memory_format=torch.channels_last)
    settings = classifier.transform.settings
    counts = torch.zeros(len(changes), 2, dtype=torch.int64, device=classifier.device)  # right, overflowed
    seen = 0
    for images, labels in batches:
        for count, change in zip(counts, changes.values(), strict=True):
            inputs = transforms.normalize(change(images), list(settings.mean), list(settings.std))
            logits = model(inputs.contiguous(memory_format=torch.channels_last))
            finite = logits.isfinite().all(1)
            right = (logits.argmax(1) == labels) & finite
            count += torch.stack([right.sum(), (~finite).sum()])
        seen += len(labels)
    if not seen:
        raise ValueError("there are no images to evaluate on")
    found = dict(zip(changes, counts.tolist(), strict=True))
    base = found["unchanged"][0]
    accuracies = {
        name: Accuracy(100 * right / seen, right / base if base else None, overflowed)
        for name, (right, overflowed) in found.items()
    }
    return Stressed(classifier.name, seen, accuracies)
