"""TrivialAugment: one random operation for each image, of random strength (Mueller and Hutter, 2021; its wide space).

The operations and strengths are those of torchvision's `TrivialAugmentWide`, with bilinear interpolation. What is drawn
is known to the host, so a batch is sorted by operation there and every family of operations gets its images as one
slice: the device runs some sixty kernels, however large the batch, and is never asked or waited for.
"""

from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsanet.train.data import draws
from gsanet.train.data.augment import Ints
from gsanet.train.data.operations import FAMILIES

OPERATIONS = tuple(chain.from_iterable(FAMILIES.values()))
LEVELS = 31  # of strength, each as likely; the first changes nothing, or next to nothing


class Operations(NamedTuple):
    """One operation for each image of a batch, sorted in the order of `OPERATIONS`."""

    counts: tuple[int, ...]  # images of each operation
    rows: Tensor  # int64 (n,): the place of each in the batch
    values: Tensor  # float32 (n, 7): where each pixel of a moved image comes from (6), and the strength of the others


def draw_operations(samples: Ints, img_size: tuple[int, int], seed: int, epoch: int) -> Operations:
    """Draw the operations of a batch, which depend on seed, epoch and each image's index in the data set."""
    u = draws.uniforms(seed, epoch, draws.POLICY, samples, 3)
    operation, level = ((u[:, :2] * (len(OPERATIONS), LEVELS)).astype(np.int64)).T
    return choose_operations(operation, level, np.where(u[:, 2] < 0.5, -1, 1), img_size)


def choose_operations(operation: Ints, level: Ints, sign: Ints, img_size: tuple[int, int]) -> Operations:
    """Sort given operations, and work out what the device needs to know of each.

    Args:
        operation: Index into `OPERATIONS`, (n,).
        level: Of strength, from 0 to `LEVELS - 1`, (n,).
        sign: 1 or -1 for operations that have two directions, (n,).
        img_size: Height and width of the images.
    """
    order = np.argsort(operation, kind="stable")
    operation, level, sign = operation[order], level[order], sign[order]
    strength = np.select(
        [operation == OPERATIONS.index("posterize"), operation == OPERATIONS.index("solarize")],
        [2.0 ** np.rint(6 * level / (LEVELS - 1)), 255 * (LEVELS - 1 - level) / (LEVELS - 1)],
        1 + sign * 0.99 * level / (LEVELS - 1),
    )
    values = np.stack([*_origins(operation, sign * level / (LEVELS - 1), img_size), strength], 1)
    return Operations(
        tuple(np.bincount(operation, minlength=len(OPERATIONS)).tolist()),
        torch.from_numpy(order),
        torch.from_numpy(values.astype(np.float32)),
    )


def _origins(
    operation: Ints, strength: NDArray[np.float64], img_size: tuple[int, int]
) -> tuple[NDArray[np.float64], ...]:
    """The affine maps from a pixel's place in the moved image to its place in the image: x by (x, y, 1), then y.

    In coordinates that go from -1 to 1 over the image. Each image is moved in one way, so the maps of the five add up.
    """

    def of(name: str, most: float) -> NDArray[np.float64]:
        return np.where(operation == OPERATIONS.index(name), most * strength, 0.0)

    height, width = img_size
    shear_x, shear_y, angle = of("shear_x", 0.99), of("shear_y", 0.99), np.radians(of("rotate", 135.0))
    shift_x, shift_y = np.trunc(of("translate_x", 32.0)), np.trunc(of("translate_y", 32.0))  # pixels, whole ones
    x_by_y, y_by_x = (shear_x - np.sin(angle)) * height / width, (shear_y + np.sin(angle)) * width / height
    # A shear leaves the first row, or column, where it is.
    x_by_1, y_by_1 = (shear_x * height - 2 * shift_x) / width, (shear_y * width - 2 * shift_y) / height
    return np.cos(angle), x_by_y, x_by_1, y_by_x, np.cos(angle), y_by_1


def operate(images: Tensor, operations: Operations) -> Tensor:
    """Change each image of a batch by its operation.

    Args:
        images: Whole values from 0 to 255, float32, (batch, 3, height, width).
        operations: Of the batch, its tensors on the same device.

    Returns:
        Whole values from 0 to 255, in memory of their own.
    """
    counts, rows, values = operations
    changed, first = [], 0
    sorted_images, remaining = images.index_select(0, rows), iter(counts)
    for family, names in FAMILIES.items():
        of_each = list(islice(remaining, len(names)))
        last = first + sum(of_each)
        if first < last:
            changed.append(family(sorted_images[first:last], values[first:last], of_each))
        first = last
    # Halves are common: they go up, by a margin, so that no device's last bit decides.
    whole = torch.cat(changed).add_(0.5005).floor_()
    return torch.empty_like(whole).index_copy_(0, rows, whole)
