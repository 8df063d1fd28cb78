"""What training does to the pixels of a view, after it is cropped and mirrored and before it is normalised.

Both data paths draw these changes here and make them by the same code, a batch at a time: for large images, a batch is
one image in a worker.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gsanet.train.data.augment import Ints
from gsanet.train.data.erase import draw_boxes, erase
from gsanet.train.data.policy import Operations, draw_operations, operate
from gsanet.train.data.settings import DataSettings


class Changes(NamedTuple):
    """The changes to one batch; None where the recipe asks for none."""

    operations: Operations | None
    boxes: Tensor | None
    colour: tuple[int, ...]  # of the boxes: the mean, as pixels have it

    def to(self, send: Callable[[Tensor], Tensor]) -> "Changes":
        """The same with its tensors where `send` puts them."""
        operations, boxes, colour = self
        if operations is not None:
            operations = operations._replace(rows=send(operations.rows), values=send(operations.values))
        return Changes(operations, None if boxes is None else send(boxes), colour)


def training_changes(settings: DataSettings, samples: Ints, seed: int, epoch: int) -> Changes:
    """Draw the changes of one batch.

    Args:
        settings: Which changes.
        samples: The index of each image in the data set, (n,): what its numbers depend on, with seed and epoch.
        seed: Of the run.
        epoch: Of the run.
    """
    operations = draw_operations(samples, settings.img_size, seed, epoch) if settings.policy == "trivial" else None
    boxes = None
    if settings.erase:
        boxes = torch.from_numpy(draw_boxes(settings.erase, samples, settings.img_size, seed, epoch))
    return Changes(operations, boxes, tuple(min(max(round(255 * mean), 0), 255) for mean in settings.mean))


def change(images: Tensor, changes: Changes) -> Tensor:
    """Change a batch: uint8 or whole float32 values from 0 to 255, (batch, 3, height, width)."""
    if changes.operations is not None:
        images = operate(images.float(), changes.operations).to(images.dtype)
    if changes.boxes is not None:
        images = erase(images, changes.boxes, changes.colour)
    return images
