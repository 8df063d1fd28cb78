"""The path for small images: decoded once, kept as uint8 on the device, augmented there by the batch."""

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from gsanet.train.data.augment import Ints, Views, evaluation_views, render, render_batch, training_views, view_table
from gsanet.train.data.changes import change, training_changes
from gsanet.train.data.damage import Damage, Damaged, decode
from gsanet.train.data.loader import Batch, Normalise, iterate
from gsanet.train.data.settings import DataSettings, Plan
from gsanet.train.data.sources import FolderSource, Source

MAX_SIDE = 128  # pixels; larger images take the other path unless told otherwise
MAX_BYTES = 4 * 2**30
PROBES = 64  # images whose size is looked at before the choice
CHUNK = 256  # images decoded at a time
GROUP = 16  # batches whose views are drawn at a time
MANY = 2000  # images; to decode fewer takes less time than to start workers


class MixedSizesError(Exception):
    """The images are not all of one size."""


class MemoryStore:
    """A split that lies decoded on the device.

    Args:
        source: The split.
        plan: Settings, seed, device.
        damage: Told of the images that do not decode.
        train: Take the next sample in place of a damaged one; otherwise go without it.
        size: Height and width of every image.
        resize: Bring images of another size to `size`, rather than refuse them.
    """

    def __init__(
        self, source: Source, plan: Plan, damage: Damage, train: bool, size: tuple[int, int], resize: bool
    ) -> None:
        images, labels, damaged = _decode_all(source, plan, damage, size, resize)
        if damaged:
            sound = np.delete(np.arange(len(source)), list(damaged))
            rows = sound[np.searchsorted(sound, np.arange(len(source))) % len(sound)] if train else sound
            images, labels = images[rows], labels[rows]
        self.plan = plan
        self.images = images.to(plan.device)  # n, height, channel, width
        self.labels = labels.to(plan.device)
        self.size = np.array(size)
        self.num_samples = len(labels)
        self.normalise = Normalise(plan)

    def batches(self, requests: Sequence[Ints], epoch: int | None) -> Iterator[Batch]:
        """One batch for each list of samples; augmented for an epoch, or as evaluation sees them."""
        for first in range(0, len(requests), GROUP):
            group = requests[first : first + GROUP]
            samples = np.concatenate(group)
            table = self._to_device(view_table(self._views(samples, epoch)))
            rows = self._to_device(torch.from_numpy(samples))
            lengths = [len(request) for request in group]
            for request, row, views in zip(group, rows.split(lengths), table.split(lengths), strict=True):
                images = render_batch(self.images[row], views, self.plan.settings.img_size)
                if epoch is not None:
                    changes = training_changes(self.plan.settings, request, self.plan.seed, epoch)
                    images = change(images, changes.to(self._to_device))
                yield self.normalise(images), self.labels[row]

    def _views(self, samples: Ints, epoch: int | None) -> Views:
        sizes = np.broadcast_to(self.size, (len(samples), 2))
        if epoch is None:
            return evaluation_views(self.plan.settings, sizes)
        return training_views(self.plan.settings, sizes, samples, self.plan.seed, epoch)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Without waiting for what the device is doing, which only memory that is pinned allows."""
        cuda = self.plan.device.type == "cuda"
        return (tensor.pin_memory() if cuda else tensor).to(self.plan.device, non_blocking=True)


def open_in_memory(source: Source, plan: Plan, damage: Damage, train: bool) -> MemoryStore | None:
    """The split in memory; None where the other path is the right one."""
    wanted = plan.settings.in_memory
    if wanted is False:
        return None
    sizes = _probe(source)
    if len(sizes) == 1:
        (size,) = sizes
        fits = max(size) <= MAX_SIDE and len(source) * 3 * size[0] * size[1] <= MAX_BYTES
        if fits or wanted:
            try:
                return MemoryStore(source, plan, damage, train, size, resize=False)
            except MixedSizesError:
                pass
    return MemoryStore(source, plan, damage, train, plan.settings.img_size, resize=True) if wanted else None


class Chunks(Dataset):
    """The whole split, decoded, in pieces."""

    def __init__(self, source: Source, size: tuple[int, int], resize: bool) -> None:
        self.source, self.size, self.resize = source, size, resize
        self.covering = DataSettings(img_size=size, augment="none", crop_pct=1.0)

    def __len__(self) -> int:
        return -(-len(self.source) // CHUNK)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, dict[int, str], bool]:
        """Images uint8 (n, height, 3, width), labels, why samples do not decode, and whether all had the size."""
        samples = range(number * CHUNK, min((number + 1) * CHUNK, len(self.source)))
        height, width = self.size
        images = torch.zeros(len(samples), height, 3, width, dtype=torch.uint8)
        labels = torch.zeros(len(samples), dtype=torch.int64)
        damaged: dict[int, str] = {}
        for row, sample in enumerate(samples):
            decoded = decode(partial(self.source.open, sample))
            if isinstance(decoded, str):
                damaged[sample] = decoded
                continue
            image, label = decoded
            size = (image.height, image.width)
            if size == self.size:
                pixels = F.pil_to_tensor(image)
            elif self.resize:
                pixels = render(image, evaluation_views(self.covering, np.array([size])), 0, self.size)
            else:
                return images, labels, damaged, False
            images[row] = pixels.permute(1, 0, 2)
            labels[row] = label
        return images, labels, damaged, True


Decoded = tuple[Tensor, Tensor, dict[int, str]]  # images, labels, and why some of them did not decode
_kept: dict[Hashable, Decoded] | None = None


@contextmanager
def decoded_once() -> Iterator[None]:
    """Keep the images of folders as long as this lasts, so that several runs on the same ones decode them once."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def _decode_all(source: Source, plan: Plan, damage: Damage, size: tuple[int, int], resize: bool) -> Decoded:
    if _kept is None or not isinstance(source, FolderSource):
        return _decode(source, plan, damage, size, resize)
    key = (source.paths.tobytes(), size, resize)
    if key in _kept:
        damage.add(_named(source, _kept[key][2]))
    else:
        _kept[key] = _decode(source, plan, damage, size, resize)
    return _kept[key]


def _decode(source: Source, plan: Plan, damage: Damage, size: tuple[int, int], resize: bool) -> Decoded:
    images = torch.empty(len(source), size[0], 3, size[1], dtype=torch.uint8)
    labels = torch.empty(len(source), dtype=torch.int64)
    damaged: dict[int, str] = {}
    chunks = Chunks(source, size, resize)
    workers = plan.settings.workers if len(source) > MANY else 0
    pieces: Iterable[Any] = iterate(chunks, plan, workers)
    if plan.rank == 0 and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        pieces = track(pieces, "Decoding", len(chunks), console=Console(stderr=True), transient=True)
    for number, (piece, piece_labels, more, same_size) in enumerate(pieces):
        if not same_size:
            raise MixedSizesError
        start = number * CHUNK
        images[start : start + len(piece)] = piece
        labels[start : start + len(piece)] = piece_labels
        damaged |= more
    damage.add(_named(source, damaged))  # at the end: if they are too many, it is known how many
    return images, labels, damaged


def _named(source: Source, damaged: dict[int, str]) -> list[Damaged]:
    return [(source.name(sample), reason) for sample, reason in damaged.items()]


def _probe(source: Source) -> set[tuple[int, int]]:
    """The sizes of some images, spread over the split."""
    sizes = set()
    for sample in np.linspace(0, len(source) - 1, min(PROBES, len(source))).astype(int).tolist():
        try:
            with source.open(sample)[0] as image:
                sizes.add((image.height, image.width))
        except Exception:  # damaged: met again, and counted, when it is decoded
            continue
    return sizes
