"""Images for training and evaluation.

Two paths, one distribution: large images are decoded and augmented by worker processes, small ones are decoded once
and augmented on the device. On both, the order of an epoch depends only on (seed, epoch), and the augmentation of a
sample only on (seed, epoch, its index): never on workers, processes, or where an earlier run stopped.
"""

from functools import cached_property

import torch

from gsanet.train.data.batches import EvalLoader, Store, TrainLoader
from gsanet.train.data.damage import Damage, DamagedDataError
from gsanet.train.data.loader import LoaderStore
from gsanet.train.data.memory import open_in_memory
from gsanet.train.data.settings import DataSettings, Plan
from gsanet.train.data.sources import Source, open_splits

__all__ = ["DamagedDataError", "Data", "DataSettings", "EvalLoader", "TrainLoader", "open_data"]


class Data:
    """A data set, opened; what a split needs to be read is made when the split is first used.

    Attributes:
        class_names: In the order of the labels.
        description: One line for people.
    """

    def __init__(self, path: str, plan: Plan, train: bool) -> None:
        splits = open_splits(path, train)
        self.class_names = splits.class_names
        self._splits, self._plan = splits, plan
        fraction = plan.settings.max_bad_fraction
        self._damage = [Damage("held-out", len(splits.val), fraction)]
        counts = f"{len(splits.val):,} held-out images"
        if splits.train is not None:
            self._damage.append(Damage("training", len(splits.train), fraction))
            counts = f"{len(splits.train):,} training and {counts}"
            if len(splits.train) < plan.batch_size:
                raise ValueError(
                    f"{path} has {len(splits.train)} training images, fewer than one batch of {plan.batch_size}"
                )
        self.description = f"{splits.title}: {counts} of {self.num_classes} classes"

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @cached_property
    def train(self) -> TrainLoader:
        """The training split."""
        if self._splits.train is None:
            raise ValueError("only the held-out split was opened")
        return TrainLoader(_open_store(self._splits.train, self._plan, self._damage[1], train=True), self._plan)

    @cached_property
    def val(self) -> EvalLoader:
        """The held-out split."""
        return EvalLoader(_open_store(self._splits.val, self._plan, self._damage[0], train=False), self._plan)

    def bad_files(self) -> list[str]:
        """The images that this process could not decode."""
        return [name for damage in self._damage for name in damage.names]


def open_data(
    path: str,
    settings: DataSettings,
    *,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device,
    train: bool = True,
) -> Data:
    """Open a data set.

    Args:
        path: A folder with the folders `train` and `val` (or `validation`, or `test`), each with a folder of images for
            each class; or `digits` (scikit-learn's); `cifar10:FOLDER` or `cifar100:FOLDER` (torchvision's files);
            `timm:NAME` or `timm:NAME:FOLDER` (of timm's `create_dataset`).
        settings: The recipe's.
        batch_size: Images of one micro-step over all processes; each gets a contiguous share.
        seed: Of the order and the augmentation.
        rank: This process.
        world_size: The number of processes.
        device: Where batches go, and where images that are kept in memory lie.
        train: Open the training split too.
    """
    return Data(path, Plan(settings, batch_size, seed, rank, world_size, torch.device(device)), train)


def _open_store(source: Source, plan: Plan, damage: Damage, train: bool) -> Store:
    return open_in_memory(source, plan, damage, train) or LoaderStore(source, plan, damage)
