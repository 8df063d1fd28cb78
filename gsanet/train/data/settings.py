"""What the user chooses about data, and what every part of the data path needs to know."""

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

Augment = Literal["crop", "resized_crop", "none"]
Policy = Literal["none", "trivial"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def default_workers() -> int:
    """One decoding process a core, the cores shared with the other training processes of this machine; at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return max(1, min(8, cores // processes))


@dataclass(frozen=True)
class DataSettings:
    """The `data` section of a recipe, and the image size.

    Attributes:
        img_size: Height and width of the network's input.
        mean: Of each channel, subtracted (pixels from 0 to 1).
        std: Of each channel, divided by.
        augment: What training sees. `crop`: the image resized to cover `img_size`, padded with black by `padding` and
            cropped at random. `resized_crop`: a random box of the image, resized. `none`: what evaluation sees.
        padding: Of `crop`, on each side.
        scale: Of `resized_crop`: the least and the largest share of the image's area.
        ratio: Of `resized_crop`: the least and the largest width / height of the box.
        flip: How often `crop` and `resized_crop` mirror the image.
        policy: What training does to the cropped and mirrored image. `trivial`: one of 14 operations on geometry,
            colour or contrast, each as likely, of random strength (TrivialAugment, as torchvision's
            `TrivialAugmentWide`).
        erase: How often training fills a box of 2 to 33 % of the area with `mean`, after that (random erasing).
        crop_pct: Evaluation sees the centre of the image, resized to cover `img_size / crop_pct`.
        in_memory: Decode all images once and keep them on the device. By default when they are small (up to 128x128
            pixels), of one size, and take no more than 4 GiB. `true` also takes larger images and images of several
            sizes: if the sizes differ, each is resized once to cover `img_size`, and its centre kept.
        workers: Decoding processes.
        max_bad_fraction: The largest share of a split's images that may fail to decode before it stops.
        holdout: This share of the training images is not trained on, and evaluation takes it in the place of the
            held-out split: to choose a recipe without looking at the test images. Which ones does not depend on the
            seed.
    """

    img_size: tuple[int, int]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    augment: Augment = "resized_crop"
    padding: int = 4
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    policy: Policy = "none"
    erase: float = 0.0
    crop_pct: float = 0.875
    in_memory: bool | None = None
    workers: int = field(default_factory=default_workers)
    max_bad_fraction: float = 0.01
    holdout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot work, with the name of the setting."""
        _require(len(self.img_size) == 2 and min(self.img_size) >= 1, "img_size", self.img_size, "two positive sizes")
        _require(len(self.mean) == 3, "mean", self.mean, "three numbers, one for each channel")
        _require(len(self.std) == 3 and min(self.std) > 0, "std", self.std, "three positive numbers")
        for name, options in (("augment", get_args(Augment)), ("policy", get_args(Policy))):
            value = getattr(self, name)
            _require(value in options, name, value, "one of " + ", ".join(options))
        sees_image = self.augment != "crop" or self.padding < min(self.img_size)
        _require(self.padding >= 0 and sees_image, "padding", self.padding, "0 or more, and below img_size")
        least, most = self.scale
        _require(0 < least <= most <= 1, "scale", self.scale, "two shares of the area, 0 < least <= largest <= 1")
        least, most = self.ratio
        _require(0 < least <= most, "ratio", self.ratio, "two positive ratios, the smaller first")
        _require(0 <= self.flip <= 1, "flip", self.flip, "from 0 to 1")
        _require(0 <= self.erase <= 1, "erase", self.erase, "from 0 to 1")
        _require(0 < self.crop_pct <= 1, "crop_pct", self.crop_pct, "above 0 and at most 1")
        _require(self.workers >= 0, "workers", self.workers, "0 or more")
        _require(0 <= self.max_bad_fraction < 1, "max_bad_fraction", self.max_bad_fraction, "from 0 to below 1")
        _require(0 <= self.holdout < 1, "holdout", self.holdout, "from 0 to below 1")


@dataclass(frozen=True)
class Plan:
    """Who reads what: the settings, the global batch, and this process's place among all.

    Attributes:
        settings: The user's.
        batch_size: Images of one micro-step, over all processes.
        seed: Of the order and the augmentation.
        rank: This process.
        world_size: The number of processes.
        device: Where the batches go.
    """

    settings: DataSettings
    batch_size: int
    seed: int
    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self) -> None:
        """Refuse a batch that the processes cannot share equally."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}")
        if self.batch_size < 1 or self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size must be a positive multiple of the {self.world_size} processes, got {self.batch_size}"
            )

    @property
    def rank_batch_size(self) -> int:
        """Images of one micro-step in this process."""
        return self.batch_size // self.world_size


def _require(holds: bool, name: str, value: object, right: str) -> None:
    if not holds:
        raise ValueError(f"data setting {name} must be {right}, got {value!r}")
