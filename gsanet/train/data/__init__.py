"""Images for training and evaluation.

Two paths, one distribution: large images are decoded and augmented by worker processes, small ones are decoded once
and augmented on the device. On both, the order of an epoch depends only on (seed, epoch), and the augmentation of a
sample only on (seed, epoch, its index): never on workers, processes, or where an earlier run stopped.
"""

from functools import cached_property

import torch

from gsanet.train.data.batches import EvalLoader, IndexedEvalLoader, IndexedTrainLoader, Store, TrainLoader
from gsanet.train.data.damage import Damage, DamagedDataError, accept_large_images
from gsanet.train.data.loader import LoaderStore
from gsanet.train.data.memory import open_in_memory
from gsanet.train.data.settings import DataSettings, Plan
from gsanet.train.data.shards import Shards
from gsanet.train.data.sources import Source, hold_out, keep_some, open_splits
from gsanet.train.data.stream import ShardEvalLoader, ShardTrainLoader

__all__ = ["DamagedDataError", "Data", "DataSettings", "EvalLoader", "TrainLoader", "open_data", "too_few"]


class Data:
    """A data set, opened; a split that is kept in memory is decoded when it is first used.

    Attributes:
        class_names: In the order of the labels.
        description: One line for people.
    """

    def __init__(self, path: str, plan: Plan, train: bool, most: int | None = None) -> None:
        accept_large_images()
        held_out = plan.settings.holdout
        splits = open_splits(path, train or held_out > 0)
        if held_out:
            splits = hold_out(splits, held_out)
        if most is not None:
            splits = keep_some(splits, most)
        self.class_names = splits.class_names
        self._splits, self._plan = splits, plan
        samples = len(splits.train) if splits.train is not None else 0
        if train and samples < plan.batch_size:
            raise ValueError(f"{path} has {too_few(samples, plan.batch_size)}")
        self._train_damage = Damage("training", samples, plan.settings.max_bad_fraction)
        self._val_damage = Damage("held-out", len(splits.val), plan.settings.max_bad_fraction)
        counts = f"{samples:,} training and " if train else ""
        self.description = f"{splits.title}: {counts}{len(splits.val):,} held-out images of {self.num_classes} classes"

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @cached_property
    def train(self) -> TrainLoader:
        """The training split."""
        source, plan, damage = self._splits.train, self._plan, self._train_damage
        if source is None:
            raise ValueError("only the held-out split was opened")
        if isinstance(source, Shards):
            return ShardTrainLoader(source, plan, damage)
        return IndexedTrainLoader(_open_store(source, plan, damage, train=True), plan)

    @cached_property
    def val(self) -> EvalLoader:
        """The held-out split."""
        source, plan, damage = self._splits.val, self._plan, self._val_damage
        if isinstance(source, Shards):
            return ShardEvalLoader(source, plan, damage)
        return IndexedEvalLoader(_open_store(source, plan, damage, train=False), plan)

    def bad_files(self) -> dict[str, str]:
        """The images that this process could not decode, and why."""
        return {**self._train_damage.reasons, **self._val_damage.reasons}


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
    most: int | None = None,
) -> Data:
    """Open a data set.

    Args:
        path: A folder with the folders `train` and `val` (or `validation`, or `test`), each with a folder of images for
            each class; or `digits` (scikit-learn's); `cifar10:FOLDER` or `cifar100:FOLDER` (torchvision's files);
            `timm:NAME` or `timm:NAME:FOLDER` (of timm's `create_dataset`); `wds:TRAIN|VAL` (patterns of tar shards, see
            `gsanet.train.data.shards`).
        settings: The recipe's.
        batch_size: Images of one micro-step over all processes; each gets a contiguous share.
        seed: Of the order and the augmentation.
        rank: This process.
        world_size: The number of processes.
        device: Where batches go, and where images that are kept in memory lie.
        train: Open the training split too.
        most: Take at most so many of the held-out images, a random choice that is always the same. Default: all.
    """
    return Data(path, Plan(settings, batch_size, seed, rank, world_size, torch.device(device)), train, most)


def too_few(images: int, batch_size: int) -> str:
    """What to say of fewer training images than one batch takes, and what to do about it."""
    smaller = 1 << max(0, (images // 4).bit_length() - 1)  # several steps an epoch
    return (
        f"{images} training images, fewer than one batch of {batch_size}: `--set batch_size={smaller}` takes smaller "
        "batches, for which lr should be lowered in proportion (recipes with lr_images do that themselves)"
    )


def _open_store(source: Source, plan: Plan, damage: Damage, train: bool) -> Store:
    return open_in_memory(source, plan, damage, train) or LoaderStore(source, plan, damage)
