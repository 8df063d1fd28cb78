"""A picture of what a recipe's augmentation does: training images, each as the network sees it in several epochs."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gsanet.train.data.damage import accept_large_images, decode
from gsanet.train.data.loader import view
from gsanet.train.data.settings import Plan
from gsanet.train.data.shards import Shards
from gsanet.train.data.sources import Source, hold_out, open_splits
from gsanet.train.recipe import Recipe

GAP = 4  # pixels between images
SMALLEST = 96  # pixels; smaller images are shown enlarged


def draw_preview(recipe: Recipe, out: Path, images: int, epochs: int) -> None:
    """Draw a row for each image: as evaluation would see it, then as each of the first epochs does.

    They are made as decoding workers make them; what is done to whole batches, mixup and CutMix, is not shown.

    Args:
        recipe: With `data.path` set. Of the data set, only the images that are shown are decoded.
        out: The file to write.
        images: How many, spread over the training split; of tar shards, the first ones.
        epochs: How many.
    """
    for name, value in (("images", images), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"a preview needs at least one of {name}, got {value}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} to write {out.name} into")
    plan = Plan(recipe.data_settings, 1, recipe.seed, 0, 1, torch.device("cpu"))
    splits = open_splits(recipe.data_path)
    if plan.settings.holdout:
        splits = hold_out(splits, plan.settings.holdout)
    assert splits.train is not None
    rows = [
        torch.stack([view(plan, image, sample, epoch) for epoch in (None, *range(epochs))])
        for sample, image in islice(_sound_images(splits.train, images), images)
    ]
    if not rows:
        raise OSError(f"none of the images of {recipe.data_path} that were tried can be decoded")
    tiles = torch.stack(rows)  # image, epoch, channel, height, width
    factor = max(1, SMALLEST // min(tiles.shape[3:]))
    tiles = tiles.repeat_interleave(factor, 3).repeat_interleave(factor, 4)
    tiles = torch.nn.functional.pad(tiles, (0, GAP, 0, GAP), value=255)
    Image.fromarray(tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).numpy()).save(out)


def _sound_images(source: Source | Shards, count: int) -> Iterator[tuple[int, Image.Image]]:
    """Images that decode, and the index of each in the split."""
    accept_large_images()
    if isinstance(source, Shards):
        tried = ((number, sample.open) for number, sample in enumerate(source.read(0)))
    else:
        spread = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int).tolist()
        tried = ((sample, partial(source.open, sample)) for sample in spread)
    for sample, open_sample in tried:
        decoded = decode(open_sample)
        if not isinstance(decoded, str):
            yield sample, decoded[0]
