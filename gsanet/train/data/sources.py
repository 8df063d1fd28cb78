"""Where images come from: each source is a list of (image, label), opened one at a time."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import IterableDataset

from gsanet.images import is_image
from gsanet.train.data import draws
from gsanet.train.data.shards import Shards, open_shards
from gsanet.words import first_line

VALIDATION_NAMES = ("val", "validation", "test")


class Source(Protocol):
    """One split of a data set."""

    def __len__(self) -> int:
        """The number of samples."""

    def open(self, index: int) -> tuple[Image.Image, int]:
        """An image, which may be decoded only when its pixels are asked for, and its label."""

    def name(self, index: int) -> str:
        """What to call a sample when it is damaged."""


@dataclass(frozen=True)
class Splits:
    """Both splits of a data set; `train` is None where only the other was asked for."""

    train: Source | Shards | None
    val: Source | Shards
    class_names: list[str]
    title: str


class FolderSource:
    """One folder of images for each class."""

    def __init__(self, folder: Path) -> None:
        from torchvision.datasets import ImageFolder

        class Visible(ImageFolder):
            def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
                names = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
                if not names:
                    raise FileNotFoundError
                return names, {name: label for label, name in enumerate(names)}

        start = len(str(folder)) + 1
        try:
            tree = Visible(str(folder), is_valid_file=lambda path: is_image(path[start:]), allow_empty=True)
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder} holds no class folders: it needs one folder of images a class") from None
        self.class_names = tree.classes
        # Arrays, since a list of a million strings is copied page by page into every worker that reads it.
        self.paths = np.array([os.fsencode(path) for path, _ in tree.samples], dtype=np.bytes_)
        self.labels = np.array(tree.targets, dtype=np.int64)
        if not tree.samples:
            raise FileNotFoundError(f"{folder} holds no images in its class folders")
        counts = np.bincount(self.labels, minlength=len(tree.classes))
        empty = [name for name, count in zip(tree.classes, counts, strict=True) if not count]
        if empty:
            raise FileNotFoundError(f"{folder} has class folders without images: {some(empty)}")

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> tuple[Image.Image, int]:
        """The image is decoded later."""
        return Image.open(self.name(index)), int(self.labels[index])

    def name(self, index: int) -> str:
        """The path."""
        return os.fsdecode(self.paths[index])


class ArraySource:
    """Images that are in memory already, uint8 (n, height, width, 3)."""

    def __init__(self, title: str, images: np.ndarray, labels: Sequence[int] | np.ndarray) -> None:
        self.title, self.images, self.labels = title, images, np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def open(self, index: int) -> tuple[Image.Image, int]:
        """The image, as it is."""
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def name(self, index: int) -> str:
        """Its number."""
        return f"{self.title} {index}"


class TimmSource:
    """What timm's `create_dataset` opens, as far as it can be indexed."""

    def __init__(self, title: str, dataset: Any) -> None:
        self.title, self.dataset = title, dataset
        # timm's ImageDataset hides damaged files; its reader does not.
        self.reader = getattr(dataset, "reader", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def open(self, index: int) -> tuple[Image.Image, int]:
        """From the reader, or from a torchvision data set."""
        image, label = self.dataset[index] if self.reader is None else self.reader[index]
        return image if isinstance(image, Image.Image) else Image.open(image), int(label)

    def name(self, index: int) -> str:
        """The reader's name for it."""
        return f"{self.title} {index}" if self.reader is None else str(self.reader.filename(index, absolute=True))


class PartSource:
    """Some of the samples of another source."""

    def __init__(self, source: Source, samples: np.ndarray) -> None:
        self.source, self.samples = source, samples

    def __len__(self) -> int:
        return len(self.samples)

    def open(self, index: int) -> tuple[Image.Image, int]:
        """As the other source does."""
        return self.source.open(int(self.samples[index]))

    def name(self, index: int) -> str:
        """The other source's name for it."""
        return self.source.name(int(self.samples[index]))


def hold_out(splits: Splits, share: float) -> Splits:
    """A share of the training images in the place of the held-out split; the other images are left to train on."""
    source = splits.train
    if source is None or isinstance(source, Shards):
        raise ValueError("data setting holdout needs images in folders or arrays: tar shards are not indexed")
    order = draws.permutation(0, 0, draws.HOLDOUT, len(source))
    count = round(share * len(source))
    if not 0 < count < len(source):
        raise ValueError(f"data setting holdout takes {count} of {len(source)} training images: choose another share")
    held_out, rest = np.sort(order[:count]), np.sort(order[count:])
    title = f"{splits.title}, held out of its training images"
    return Splits(PartSource(source, rest), PartSource(source, held_out), splits.class_names, title)


def keep_some(splits: Splits, most: int) -> Splits:
    """At most so many images of the held-out split: a random choice, always the same."""
    source = splits.val
    if len(source) <= most:
        return splits
    if isinstance(source, Shards):
        raise ValueError(f"tar shards are not indexed, so that {most} of their {len(source)} images cannot be chosen")
    chosen = np.sort(draws.permutation(0, 0, draws.SOME, len(source))[:most])
    return replace(splits, val=PartSource(source, chosen))


def open_folder(path: str, train: bool) -> Splits:
    """`path/train` and `path/val` (or `validation`, or `test`), each with one folder a class."""
    root = Path(path).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {path}: data is a folder with train/ and val/, or one of {FORMS}")
    validation = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if validation is None:
        names = " or ".join(VALIDATION_NAMES)
        raise FileNotFoundError(f"{path} has no held-out split: it needs a folder named {names}")
    val = FolderSource(validation)
    if not train:
        return Splits(None, val, val.class_names, path)
    if not (root / "train").is_dir():
        raise FileNotFoundError(f"{path} has no training split: it needs a folder named train")
    source = FolderSource(root / "train")
    _check_classes(validation.name, val.class_names, source.class_names)
    return Splits(source, val, source.class_names, path)


def open_cifar(name: str, path: str, train: bool) -> Splits:
    """CIFAR-10 or CIFAR-100 as torchvision stores it, never downloaded."""
    from torchvision import datasets

    make = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    root = Path(path).expanduser()
    try:
        val = make(root, train=False, download=False)
        training = make(root, train=True, download=False) if train else None
    except RuntimeError:
        raise FileNotFoundError(
            f"{path} does not hold {name} whole: it needs the unpacked folder {make.base_folder} (python version)"
        ) from None
    source = ArraySource(f"{name} training image", training.data, training.targets) if training else None
    return Splits(source, ArraySource(f"{name} test image", val.data, val.targets), val.classes, name)


def open_timm(name: str, path: str, train: bool) -> Splits:
    """`NAME` or `NAME:FOLDER` of timm's `create_dataset`."""
    from timm.data import create_dataset

    if not path and "/" not in name:  # as in hfds/NAME: what comes from elsewhere
        raise ValueError(f"timm needs the folder of {name!r}: timm:{name}:FOLDER")

    def split(which: str) -> TimmSource:
        try:
            dataset = create_dataset(name, root=path or None, split=which)
        except Exception as error:  # of timm, or of the library behind the name
            raise ValueError(f"timm cannot open the {which} split of {name!r}: {first_line(error)}") from error
        if isinstance(dataset, IterableDataset):
            raise ValueError(f"timm can only stream {name!r}: give its tar shards as wds:TRAIN|VAL")
        return TimmSource(f"{name} {which} image", dataset)

    val = split("validation")
    training = split("train") if train else None
    classes = getattr(val.dataset, "classes", None) or getattr(val.reader, "class_to_idx", None)
    if not classes:
        raise ValueError(f"timm does not say which classes {name!r} has")
    names = sorted(classes, key=classes.__getitem__) if isinstance(classes, dict) else list(classes)
    return Splits(training, val, [str(each) for each in names], f"timm:{name}")


def open_digits(train: bool) -> Splits:
    """scikit-learn's 1,797 scans of digits, 8x8, one in five held out; no download."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    scans = load_digits()
    grey = np.rint(scans.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=3)
    training, held_out = train_test_split(np.arange(len(images)), test_size=360, stratify=scans.target, random_state=0)

    def part(title: str, rows: np.ndarray) -> ArraySource:
        rows = np.sort(rows)
        return ArraySource(title, images[rows], scans.target[rows])

    source = part("training digit", training) if train else None
    return Splits(source, part("held-out digit", held_out), [str(name) for name in scans.target_names], "digits")


def open_wds(patterns: str, train: bool) -> Splits:
    """`TRAIN|VAL`, two patterns of tar shards; `VAL` alone will do where only that is asked for."""
    training, bar, validation = patterns.rpartition("|")
    if train and not bar:
        raise ValueError(f"tar shards need two patterns, as wds:TRAIN|VAL, got {patterns!r}")
    val = open_shards(validation)
    if not train:
        return Splits(None, val, val.class_names, validation)
    source = open_shards(training)
    # Counted shards know only the labels that they hold.
    return Splits(source, val, max(source.class_names, val.class_names, key=len), training)


FORMS = "digits, cifar10:FOLDER, cifar100:FOLDER, timm:NAME:FOLDER, wds:TRAIN|VAL"


def open_splits(path: str, train: bool = True) -> Splits:
    """Open a data set by its path (see `gsanet.train.data.open_data`); nothing is decoded yet."""
    form, colon, rest = path.partition(":")
    if path == "digits":
        return open_digits(train)
    if form in ("cifar10", "cifar100") and colon:
        return open_cifar(form, rest, train)
    if form == "timm" and colon:
        name, _, root = rest.partition(":")
        return open_timm(name, root, train)
    if form == "wds" and colon:
        return open_wds(rest, train)
    return open_folder(path, train)


def data_name(path: str) -> str:
    """What to call a data set where its place does not matter: the last part of a folder, or the name of its kind."""
    form, colon, rest = path.partition(":")
    if form == "timm" and colon:
        return rest.partition(":")[0]
    return form if colon else Path(path).expanduser().resolve().name


def evaluated_on(path: str, images: int, holdout: float = 0.0) -> str:
    """Which images an accuracy is of, in words."""
    which = "training images, held out," if holdout else "held-out images"
    return f"the {images:,} {which} of {data_name(path)}"


def _check_classes(name: str, found: list[str], wanted: list[str]) -> None:
    lacking, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if lacking:
        raise FileNotFoundError(f"{name}/ lacks class folders that train/ has: {some(lacking)}")
    if extra:
        raise FileNotFoundError(f"{name}/ has class folders that train/ lacks: {some(extra)}")


def some(names: Sequence[str]) -> str:
    """The first few names, and how many there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
