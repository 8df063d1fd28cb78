"""What a network's arithmetic bears: statistics of the batch, bfloat16, inputs that are larger than those of any image.

Attention multiplies activations with each other, so that what is too large grows from block to block, and in
evaluation no batch norm holds it back: docs/results.md, "Where a GSA network overflows".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as transforms

from gsanet.predict import Classifier
from gsanet.stress.measure import BATCH

FACTORS = (1.5, 2, 3, 4, 8)
NOISES = 32  # images
SEED = 12


@dataclass(frozen=True)
class Outputs:
    """Of a network in one case.

    Attributes:
        images: How many it saw.
        top1: In per cent; None for patterns, which show nothing.
        largest: The largest size of a logit among the images whose output is finite; None where none is.
        overflowed: Images whose output is not finite: they count as wrong.
    """

    images: int
    top1: float | None
    largest: float | None
    overflowed: int


@dataclass(frozen=True)
class Limits:
    """What was found of one network.

    Attributes:
        network: Its name, as in `gsanet models`.
        cases: By name: `as evaluated`, which is float32 with running statistics, and what departs from it.
    """

    network: str
    cases: Mapping[str, Outputs]

    def to_json(self) -> dict[str, Any]:
        """With the keys `network` and `cases` (a list of `case`, `images`, `top1`, `largest`, `overflowed`)."""
        return {"network": self.network, "cases": [{"case": name, **asdict(row)} for name, row in self.cases.items()]}


def mix(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The images of several batches, as bytes and in another order, always the same; batches of up to 64.

    Images come class by class, and statistics of a batch that holds a few classes are not those of a batch in training.

    Args:
        batches: Of images in [0, 1] and labels, such as those of `open_images`.
    """
    held = [(images.mul(255).round_().to(torch.uint8), labels) for images, labels in batches]
    if not held:
        raise ValueError("there are no images to evaluate on")
    images, labels = (torch.cat(parts) for parts in zip(*held, strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED)).to(labels.device)
    # As equal as can be: a small rest would have statistics of its own.
    return [(images[part], labels[part]) for part in order.tensor_split(-(-len(order) // BATCH))]


@torch.inference_mode()
def measure_limits(classifier: Classifier, batches: Iterable[tuple[Tensor, Tensor]]) -> Limits:
    """Count how many images a network gets right in each case, and how large its outputs become.

    Args:
        classifier: The network.
        batches: From `mix`; of a size for which statistics make sense.
    """
    settings = classifier.transform.settings
    model = deepcopy(classifier.model).eval().to(memory_format=torch.channels_last)
    cases: dict[str, Callable[[Tensor], Tensor]] = {
        "as evaluated": model,
        "statistics of the batch": _with_batch_statistics(model),
        "bfloat16": _in_bfloat16(model),
        **{f"inputs x {factor:g}": _scaled(model, factor) for factor in FACTORS},
    }

    def prepare(images: Tensor) -> Tensor:
        inputs = transforms.normalize(images, list(settings.mean), list(settings.std))
        return inputs.contiguous(memory_format=torch.channels_last)

    tallies = {name: _Tally() for name in cases}
    for images, labels in batches:
        inputs = prepare(images / 255)
        for name, run in cases.items():
            tallies[name].add(run(inputs), labels)
    found = {name: tally.outputs(labelled=True) for name, tally in tallies.items()}
    for name, images in patterns(settings.img_size).items():
        tally = _Tally()
        tally.add(model(prepare(images.to(classifier.device))))
        found[name] = tally.outputs(labelled=False)
    return Limits(classifier.name, found)


def patterns(size: tuple[int, int]) -> dict[str, Tensor]:
    """The extremes of what pixels can be, by kind: images in {0, 1}, (number, 3, height, width)."""
    row, column = torch.arange(size[0])[:, None], torch.arange(size[1])
    sides = [2**power for power in range(min(size).bit_length() - 1)]  # of a square, up to half of the image
    corners = torch.tensor(list(product((0.0, 1.0), repeat=3)))  # black, white, and six colours
    drawn = torch.rand(NOISES, 3, *size, generator=torch.Generator().manual_seed(SEED)).round_()
    drawn[::2] = drawn[::2, :1]  # half of them without colours
    return {
        "plain colours": corners[:, :, None, None].expand(-1, -1, *size),
        "stripes": _in_grey([line // side % 2 for side in sides for line in (row, column)], size),
        "checkerboards": _in_grey([(row // side + column // side) % 2 for side in sides], size),
        "noise": drawn,
    }


def _in_grey(images: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    return torch.stack([image.float().expand(3, *size) for image in images])


def _with_batch_statistics(model: nn.Module) -> nn.Module:
    """A copy that normalises each batch by its own mean and variance, as training does."""
    model = deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    return model


def _in_bfloat16(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Computed as recipes do on a GPU: bf16 where autocast thinks that it is safe."""

    def run(inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return model(inputs)

    return run


def _scaled(model: nn.Module, factor: float) -> Callable[[Tensor], Tensor]:
    return lambda inputs: model(factor * inputs)


class _Tally:
    """What is known of a case so far."""

    def __init__(self) -> None:
        self.images = self.right = self.overflowed = 0
        self.largest: float | None = None

    def add(self, logits: Tensor, labels: Tensor | None = None) -> None:
        finite = logits.isfinite().all(1)
        self.images += len(logits)
        self.overflowed += int((~finite).sum())
        if finite.any():
            self.largest = max(self.largest or 0.0, logits[finite].abs().max().item())
        if labels is not None:
            self.right += int(((logits.argmax(1) == labels) & finite).sum())

    def outputs(self, labelled: bool) -> Outputs:
        top1 = 100 * self.right / self.images if labelled else None
        return Outputs(self.images, top1, self.largest, self.overflowed)
