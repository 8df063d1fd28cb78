"""Which samples make up each batch of each process."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from gsanet.train.data import draws
from gsanet.train.data.augment import Ints
from gsanet.train.data.loader import Batch
from gsanet.train.data.settings import Plan


class TrainLoader(ABC):
    """The training split: batches of one size, in a new order each epoch.

    Attributes:
        num_samples: Of the whole split, over all processes.
    """

    def __init__(self, num_samples: int, plan: Plan) -> None:
        self.num_samples, self.plan = num_samples, plan

    def __len__(self) -> int:
        """Batches of an epoch; the incomplete last one is dropped."""
        return self.num_samples // self.plan.batch_size

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of each batch of an epoch: images (normalised, float32, channels last) and labels.

        Args:
            epoch: From 0.
            start: The first batch to yield; from there on, exactly what the whole epoch yields.
        """


class EvalLoader(ABC):
    """The held-out split: every sample exactly once over all processes, but for damaged ones.

    Attributes:
        num_samples: Of the whole split, over all processes; damaged ones count until they are met.
    """

    num_samples: int

    @abstractmethod
    def __len__(self) -> int:
        """Batches of this process."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """This process's share: images (normalised, float32, channels last) and labels."""


class Store(Protocol):
    """A split whose samples are known by their index."""

    num_samples: int

    def batches(self, requests: Sequence[Ints], epoch: int | None) -> Iterator[Batch]:
        """One batch for each list of samples; augmented for an epoch, or as evaluation sees them."""


class IndexedTrainLoader(TrainLoader):
    """Any order is possible: every epoch is a new permutation."""

    def __init__(self, store: Store, plan: Plan) -> None:
        super().__init__(store.num_samples, plan)
        self.store = store

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """As `TrainLoader.batches`."""
        plan = self.plan
        order = draws.permutation(plan.seed, epoch, draws.ORDER, self.num_samples)
        share = order[: len(self) * plan.batch_size].reshape(len(self), plan.world_size, plan.rank_batch_size)
        return self.store.batches(list(share[start:, plan.rank]), epoch)


class IndexedEvalLoader(EvalLoader):
    """Each process has one contiguous share."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.num_samples, self.store = store.num_samples, store
        share = np.array_split(np.arange(self.num_samples), plan.world_size)[plan.rank]
        self.requests = [
            share[start : start + plan.rank_batch_size] for start in range(0, len(share), plan.rank_batch_size)
        ]

    def __len__(self) -> int:
        return len(self.requests)

    def batches(self) -> Iterator[Batch]:
        """As `EvalLoader.batches`."""
        return self.store.batches(self.requests, None)
