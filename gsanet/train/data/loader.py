"""The path for large images: worker processes decode and augment, the device normalises."""

import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gsanet.train.data.augment import Ints, evaluation_views, render, training_views
from gsanet.train.data.changes import change, training_changes
from gsanet.train.data.damage import Damage, Damaged, accept_large_images, allowed, decode
from gsanet.train.data.settings import Plan
from gsanet.train.data.sources import Source

Batch = tuple[Tensor, Tensor]
WorkerBatch = tuple[Tensor, Tensor, list[Damaged]]  # images uint8, labels, damaged samples


class LoaderStore:
    """A split whose images are decoded each time."""

    def __init__(self, source: Source, plan: Plan, damage: Damage) -> None:
        self.source, self.plan, self.damage = source, plan, damage
        self.num_samples = len(source)
        self.normalise = Normalise(plan)

    def batches(self, requests: Sequence[Ints], epoch: int | None) -> Iterator[Batch]:
        """One batch for each list of samples; augmented for an epoch, or as evaluation sees them."""
        batches = WorkerBatches(self.source, self.plan, requests, epoch)
        for images, labels, damaged in iterate(batches, self.plan, self.plan.settings.workers):
            self.damage.add(damaged)
            if len(labels):
                yield self.normalise(images), labels.to(self.plan.device, non_blocking=True)


class WorkerBatches(Dataset[WorkerBatch]):
    """The batches of one pass over a split, each made whole by one worker."""

    def __init__(self, source: Source, plan: Plan, requests: Sequence[Ints], epoch: int | None) -> None:
        self.source, self.plan, self.requests, self.epoch = source, plan, requests, epoch

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, number: int) -> WorkerBatch:
        """One batch."""
        views: list[Tensor] = []
        labels: list[int] = []
        damaged: list[Damaged] = []
        for sample in self.requests[number].tolist():
            for candidate in self._candidates(sample):
                decoded = decode(partial(self.source.open, candidate))
                if isinstance(decoded, str):
                    damaged.append((self.source.name(candidate), decoded))
                    continue
                image, label = decoded
                views.append(view(self.plan, image, sample, self.epoch))
                labels.append(label)
                break
        return collate(self.plan, views, labels, damaged)

    def _candidates(self, sample: int) -> Iterator[int]:
        """Training takes the next sample in place of a damaged one; evaluation goes without it."""
        tries = 1 if self.epoch is None else 1 + allowed(len(self.source), self.plan.settings.max_bad_fraction)
        return ((sample + step) % len(self.source) for step in range(tries))


def view(plan: Plan, image: Image.Image, sample: int, epoch: int | None) -> Tensor:
    """What the network sees of one image in an epoch, or in evaluation."""
    settings, size = plan.settings, np.array([[image.height, image.width]])
    if epoch is None:
        return render(image, evaluation_views(settings, size), 0, settings.img_size)
    samples = np.array([sample])
    views = training_views(settings, size, samples, plan.seed, epoch)
    pixels = render(image, views, 0, settings.img_size)
    return change(pixels[None], training_changes(settings, samples, plan.seed, epoch))[0]


def collate(plan: Plan, views: list[Tensor], labels: list[int], damaged: list[Damaged]) -> WorkerBatch:
    """One batch of what a worker has made, which may be nothing."""
    empty = torch.empty(0, 3, *plan.settings.img_size, dtype=torch.uint8)
    return torch.stack(views) if views else empty, torch.tensor(labels, dtype=torch.int64), damaged


def iterate(dataset: Dataset[Any], plan: Plan, workers: int) -> Iterator[Any]:
    """A DataLoader over batches that the data set has made whole."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        pin_memory=plan.device.type == "cuda",
        worker_init_fn=_start_worker if workers else None,
        # Its own, so that a pass over the data leaves the global generator, and with it dropout, untouched.
        generator=torch.Generator(),
    )
    try:
        for batch in loader:
            if isinstance(batch, OSError):  # handed over by a worker, whose traceback would bury it
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OSError("a decoding process died: it may have run out of memory, or of shared memory") from error


def _start_worker(number: int) -> None:
    # Ctrl-C is for the main process, which saves a checkpoint and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    accept_large_images()


class Normalise:
    """Pixel values from 0 to 255 to what the network takes: float32, channels last, on the device."""

    def __init__(self, plan: Plan) -> None:
        std = 255 * torch.tensor(plan.settings.std, device=plan.device).view(1, 3, 1, 1)
        self.scale = 1 / std
        self.shift = -255 * torch.tensor(plan.settings.mean, device=plan.device).view(1, 3, 1, 1) / std
        self.device = plan.device

    def __call__(self, images: Tensor) -> Tensor:
        """Takes uint8 or whole float32 values, (batch, channel, height, width)."""
        images = images.to(self.device, non_blocking=True)
        images = images.to(torch.float32, memory_format=torch.channels_last)
        return images.mul_(self.scale).add_(self.shift)
