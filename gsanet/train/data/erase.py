"""Random erasing (Zhong and others, 2020): a box of the image is filled with the mean colour."""

import numpy as np
import torch
from torch import Tensor

from gsanet.train.data import draws
from gsanet.train.data.augment import TRIES, Ints

AREA = (0.02, 0.33)  # of the image
RATIO = (0.3, 3.3)  # height / width


def draw_boxes(probability: float, samples: Ints, img_size: tuple[int, int], seed: int, epoch: int) -> Ints:
    """Top, left, height and width of what is erased of each image, (n, 4); no height and no width: nothing.

    Drawn as by torchvision's `RandomErasing`, which takes the first of ten boxes that fits, or none.
    """
    u = draws.uniforms(seed, epoch, draws.ERASE, samples, 3 + 2 * TRIES)
    area = np.prod(img_size) * (AREA[0] + (AREA[1] - AREA[0]) * u[:, 3 : 3 + TRIES])
    least, most = np.log(RATIO)
    ratio = np.exp(least + (most - least) * u[:, 3 + TRIES :])
    tries = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], 2))).astype(np.int64)  # n, try, height and width
    fits = (tries < np.array(img_size)).all(2)
    size = tries[np.arange(len(samples)), fits.argmax(1)]
    size[~fits.any(1) | (u[:, 2] >= probability)] = 0
    corner = (u[:, :2] * (np.array(img_size) - size + 1)).astype(np.int64)
    return np.concatenate([corner, size], 1)


def erase(images: Tensor, boxes: Tensor, colour: tuple[int, ...]) -> Tensor:
    """Fill the box of each image of a batch, in place.

    Args:
        images: Of any type, (batch, 3, height, width).
        boxes: From `draw_boxes`, (batch, 4), on the same device.
        colour: Of the three channels, in the images' unit.
    """
    top, left, height, width = boxes[:, :, None].unbind(1)  # each batch, 1
    y, x = (torch.arange(length, device=images.device) for length in images.shape[2:])
    down, along = (y >= top) & (y < top + height), (x >= left) & (x < left + width)
    inside = down[:, :, None] & along[:, None]  # batch, height, width
    for channel, value in enumerate(colour):
        images[:, channel].masked_fill_(inside, value)
    return images
