"""The path for tar shards: read as streams, never whole, and still in an exact order.

A stream cannot be indexed, so an epoch is made of lanes. The shards are put into a random order, and the long list of
their samples is cut into equal lanes. Each lane is read on its own, through a shuffle buffer, and fills the same places
of every batch. The number of lanes depends on the batch size alone; processes, and workers within them, share out whole
lanes. So none of them reads what another needs, and their number does not change what a batch holds.
"""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gsanet.train.data import draws
from gsanet.train.data.augment import Ints
from gsanet.train.data.batches import EvalLoader, TrainLoader
from gsanet.train.data.damage import Damage, Damaged, decode
from gsanet.train.data.loader import Batch, Normalise, WorkerBatch, collate, iterate, view
from gsanet.train.data.settings import Plan
from gsanet.train.data.shards import Sample, Shards

MAX_LANES = 64  # and so the largest number of processes
BUFFER = 8192  # samples, in all lanes together

Numbered = tuple[int, Sample]  # a sample, and its index in the split


class ShardTrainLoader(TrainLoader):
    """The training split, streamed."""

    def __init__(self, shards: Shards, plan: Plan, damage: Damage) -> None:
        super().__init__(len(shards), plan)
        self.shards, self.damage, self.normalise = shards, damage, Normalise(plan)
        self.lanes = _number_of_lanes(plan)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """As `TrainLoader.batches`; what comes before `start` is read, but not decoded."""
        plan = self.plan
        workers = min(plan.settings.workers, self.lanes // plan.world_size)
        lanes = LanePieces(self.shards, plan, self.damage, self.lanes, epoch, range(start, len(self)))
        pieces = iterate(lanes, plan, workers)
        for _ in range(start, len(self)):
            # Workers are asked in turn: one piece of each is a batch.
            images, labels, damaged = zip(*islice(pieces, max(1, workers)), strict=True)
            self.damage.add(chain(*damaged))
            yield self.normalise(self._join(images)), self._join(labels)

    def _join(self, pieces: tuple[Tensor, ...]) -> Tensor:
        # On the device: copies of the workers' pinned memory need not be waited for.
        return torch.cat([piece.to(self.plan.device, non_blocking=True) for piece in pieces])


class ShardEvalLoader(EvalLoader):
    """The held-out split, streamed."""

    def __init__(self, shards: Shards, plan: Plan, damage: Damage) -> None:
        self.num_samples = len(shards)
        self.shards, self.plan, self.damage, self.normalise = shards, plan, damage, Normalise(plan)

    def __len__(self) -> int:
        workers = max(1, self.plan.settings.workers)
        shares = (_eval_share(self.num_samples, self.plan, worker, workers) for worker in range(workers))
        return sum(-(-len(share) // self.plan.rank_batch_size) for share in shares)

    def batches(self) -> Iterator[Batch]:
        """As `EvalLoader.batches`."""
        plan = self.plan
        for images, labels, damaged in iterate(EvalPieces(self.shards, plan), plan, plan.settings.workers):
            self.damage.add(damaged)
            if len(labels):
                yield self.normalise(images), labels.to(plan.device, non_blocking=True)


class Pieces(IterableDataset[WorkerBatch | OSError]):
    """What one worker reads; an error is handed over as the last piece, to be raised in the main process."""

    def __init__(self, shards: Shards, plan: Plan) -> None:
        self.shards, self.plan = shards, plan

    def __iter__(self) -> Iterator[WorkerBatch | OSError]:
        info = get_worker_info()
        try:
            yield from self.pieces(*(info.id, info.num_workers) if info else (0, 1))
        except OSError as error:
            yield error

    @abstractmethod
    def pieces(self, worker: int, workers: int) -> Iterator[WorkerBatch]:
        """The pieces of one worker of several."""

    def decode(self, sample: Sample) -> tuple[Image.Image, int] | str:
        """Image and label; or why it does not decode."""
        decoded = decode(sample.open)
        classes = len(self.shards.class_names)
        if not isinstance(decoded, str) and not 0 <= decoded[1] < classes:
            raise OSError(f"{sample.name} has the label {decoded[1]}, but there are {classes} classes")
        return decoded


class LanePieces(Pieces):
    """The part of each batch that the lanes of one worker fill."""

    def __init__(self, shards: Shards, plan: Plan, damage: Damage, lanes: int, epoch: int, batches: range) -> None:
        super().__init__(shards, plan)
        self.damage, self.lanes, self.epoch, self.batches = damage, lanes, epoch, batches
        self.places = plan.batch_size // lanes  # of a lane in a batch
        self.order = draws.permutation(plan.seed, epoch, draws.SHARD_ORDER, len(shards.urls))

    def pieces(self, worker: int, workers: int) -> Iterator[WorkerBatch]:
        """One piece a batch."""
        of_rank = np.array_split(np.arange(self.lanes), self.plan.world_size)[self.plan.rank]
        lanes = [self._fill(lane) for lane in np.array_split(of_rank, workers)[worker].tolist()]
        for _ in self.batches:
            filled = chain.from_iterable(islice(lane, self.places) for lane in lanes)
            views, labels, damaged = zip(*filled, strict=True)
            yield collate(self.plan, list(views), list(labels), list(chain(*damaged)))

    def _fill(self, lane: int) -> Iterator[tuple[Tensor, int, list[Damaged]]]:
        """View and label of each of a lane's places, and the damaged samples met on the way.

        The place of a damaged sample goes to the next sound one, which then fills its own as well.
        """
        places: list[int] = []
        damaged: list[Damaged] = []
        for place, sample in self._read(lane):
            places.append(place)
            decoded = self.decode(sample)
            if isinstance(decoded, str):
                damaged.append((sample.name, decoded))
                self.damage.add(damaged)
                continue
            for each in places:
                yield view(self.plan, decoded[0], each, self.epoch), decoded[1], damaged
                damaged = []
            places = []

    def _read(self, lane: int) -> Iterator[Numbered]:
        """The samples of a lane, shuffled; then, should its last ones be damaged, those of the following lanes."""
        total = len(self.shards)
        lane_ends = np.arange(self.lanes + 1) * total // self.lanes
        first, last = lane_ends[lane : lane + 2].tolist()
        u = draws.uniforms(self.plan.seed, self.epoch, draws.SHARD_BUFFER, np.arange(first, last), 1)[:, 0]
        samples = _shuffle(_read_range(self.shards, self.order, first, last), u, max(1, BUFFER // self.lanes))
        following = (_read_range(self.shards, self.order, *ends) for ends in ((last, total), (0, first)))
        return chain(islice(samples, self.batches.start * self.places, None), chain.from_iterable(following))


class EvalPieces(Pieces):
    """Batches of one worker's share of the held-out split."""

    def pieces(self, worker: int, workers: int) -> Iterator[WorkerBatch]:
        """Whole batches, the last perhaps smaller; a damaged sample leaves a gap."""
        share = _eval_share(len(self.shards), self.plan, worker, workers)
        samples = _read_range(self.shards, np.arange(len(self.shards.urls)), share.start, share.stop)
        while batch := list(islice(samples, self.plan.rank_batch_size)):
            decoded = [(sample.name, self.decode(sample)) for _, sample in batch]
            sound = [each for _, each in decoded if not isinstance(each, str)]
            views = [view(self.plan, image, 0, None) for image, _ in sound]
            damaged = [(name, each) for name, each in decoded if isinstance(each, str)]
            yield collate(self.plan, views, [label for _, label in sound], damaged)


def _read_range(shards: Shards, order: Ints, first: int, last: int) -> Iterator[Numbered]:
    """The samples from `first` to before `last`, counted over the shards in the given order."""
    numbers = np.cumsum(shards.sizes) - shards.sizes  # of each shard's first sample in the split
    ends = np.cumsum(shards.sizes[order])
    for shard, end in zip(order.tolist(), ends.tolist(), strict=True):
        begin = end - int(shards.sizes[shard])
        start, stop = max(first - begin, 0), min(last, end) - begin
        if start < stop:
            samples = range(numbers[shard] + start, numbers[shard] + stop)
            yield from zip(samples, shards.read(shard, start), strict=False)


def _shuffle(samples: Iterator[Numbered], u: NDArray[np.float64], size: int) -> Iterator[Numbered]:
    """Draw each next sample from a buffer of the given size, which is emptied at the end."""
    buffer: list[Numbered] = []
    draw = iter(u.tolist())
    while True:
        buffer.extend(islice(samples, size - len(buffer)))
        if not buffer:
            return
        chosen = int(next(draw) * len(buffer))
        buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
        yield buffer.pop()


def _eval_share(total: int, plan: Plan, worker: int, workers: int) -> range:
    """What one worker of one process evaluates."""
    share, shares = plan.rank * workers + worker, plan.world_size * workers
    return range(total * share // shares, total * (share + 1) // shares)


def _number_of_lanes(plan: Plan) -> int:
    """The largest divisor of the batch size up to 64, so that every lane fills as many places."""
    lanes = max(number for number in range(1, MAX_LANES + 1) if plan.batch_size % number == 0)
    if lanes % plan.world_size:
        raise ValueError(
            f"a batch of {plan.batch_size} streamed images is read in {lanes} lanes, which {plan.world_size} processes "
            f"cannot share: choose a batch size that is a multiple of {plan.world_size} times a power of two"
        )
    return lanes
