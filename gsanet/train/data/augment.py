"""What the network sees of each image: drawn in one place, rendered one image at a time or a whole batch at once.

A view is a box of the image, resized, then cropped or padded with black to the network's input, then perhaps mirrored.
Random resized crops, padded random crops and evaluation's centre crop are all views; both data paths draw them here.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from gsanet.train.data import draws
from gsanet.train.data.settings import DataSettings

Ints = NDArray[np.int64]

TRIES = 10  # of a box that fits, then the largest in the middle; as torchvision's RandomResizedCrop


class Views(NamedTuple):
    """Views of n images, as integers of shape (n, ...)."""

    box: Ints  # top, left, height, width in the image
    resized: Ints  # height, width that the box is resized to
    offset: Ints  # top, left of the input in the resized box; what lies outside is black
    flip: NDArray[np.bool_]


def training_views(settings: DataSettings, sizes: Ints, samples: Ints, seed: int, epoch: int) -> Views:
    """Draw the views of one epoch.

    Args:
        settings: Which augmentation.
        sizes: Height and width of each image, (n, 2).
        samples: The index of each image in the data set, (n,): what its numbers depend on, with seed and epoch.
        seed: Of the run.
        epoch: Of the run.
    """
    if settings.augment == "none":
        return evaluation_views(settings, sizes)
    count = 3 + (2 * TRIES if settings.augment == "resized_crop" else 0)
    u = draws.uniforms(seed, epoch, draws.VIEW, samples, count)
    flip = u[:, 2] < settings.flip
    if settings.augment == "crop":
        resized = _cover(sizes, settings.img_size)
        room = resized - np.array(settings.img_size) + 2 * settings.padding
        return Views(_whole(sizes), resized, _integer(u[:, :2], room) - settings.padding, flip)
    resized = np.broadcast_to(np.array(settings.img_size), sizes.shape)
    return Views(_random_boxes(settings, sizes, u), resized, np.zeros_like(sizes), flip)


def evaluation_views(settings: DataSettings, sizes: Ints) -> Views:
    """The centre of each image, the same in every epoch."""
    height, width = settings.img_size
    target = (int(height / settings.crop_pct), int(width / settings.crop_pct))
    resized = _cover(sizes, target)
    offset = np.rint((resized - np.array(settings.img_size)) / 2).astype(np.int64)
    return Views(_whole(sizes), resized, offset, np.zeros(len(sizes), bool))


def _random_boxes(settings: DataSettings, sizes: Ints, u: NDArray[np.float64]) -> Ints:
    """The first of ten random boxes that fits into the image, else the largest allowed one in its middle."""
    area, log_ratio = u[:, 3 : 3 + TRIES], u[:, 3 + TRIES :]
    least, most = settings.scale
    area = sizes.prod(1, keepdims=True) * (least + (most - least) * area)
    least, most = np.log(settings.ratio)
    ratio = np.exp(least + (most - least) * log_ratio)
    tries = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], 2))).astype(np.int64)  # n, try, height and width
    fits = ((tries > 0) & (tries <= sizes[:, None])).all(2)
    first = tries[np.arange(len(sizes)), fits.argmax(1)]
    middle = _largest(settings, sizes)
    any_fits = fits.any(1, keepdims=True)
    size = np.where(any_fits, first, middle)
    corner = np.where(any_fits, _integer(u[:, :2], sizes - size), (sizes - size) // 2)
    return np.concatenate([corner, size], 1)


def _largest(settings: DataSettings, sizes: Ints) -> Ints:
    """The largest box of an allowed ratio in each image."""
    height, width = sizes.T
    least, most = settings.ratio
    tall = np.rint(width / least).astype(np.int64)
    wide = np.rint(height * most).astype(np.int64)
    return np.maximum(1, np.stack([np.minimum(height, tall), np.minimum(width, wide)], 1))


def _cover(sizes: Ints, target: tuple[int, int]) -> Ints:
    """Each size scaled, its ratio kept, until it just covers the target."""
    factor = (np.array(target) / sizes).max(1, keepdims=True)
    return np.maximum(np.floor(sizes * factor + 1e-6).astype(np.int64), np.array(target))


def _whole(sizes: Ints) -> Ints:
    return np.concatenate([np.zeros_like(sizes), sizes], 1)


def _integer(u: NDArray[np.float64], most: Ints) -> Ints:
    """Whole numbers from 0 to `most`, each as likely."""
    return (u * (most + 1)).astype(np.int64)


def render(image: Image.Image, views: Views, row: int, img_size: tuple[int, int]) -> Tensor:
    """One view of one image, as uint8 (3, height, width)."""
    top, left, height, width = views.box[row].tolist()
    if (left, top, width, height) != (0, 0, *image.size):
        image = image.crop((left, top, left + width, top + height))
    view = F.pil_to_tensor(image)
    resized = views.resized[row].tolist()
    if resized != [height, width]:
        view = F.resize(view, resized, antialias=True)
    top, left = views.offset[row].tolist()
    if (top, left, *img_size) != (0, 0, *resized):
        view = F.crop(view, top, left, *img_size)
    return F.horizontal_flip(view) if views.flip[row] else view


def view_table(views: Views) -> Tensor:
    """Views as float32 (n, 2, 5): for height and for width, what `render_batch` needs to know."""
    no_flip = np.zeros_like(views.flip)
    flip = np.stack([no_flip, views.flip], 1)
    columns = [views.box[:, :2], views.box[:, 2:], views.resized, views.offset, flip]
    return torch.from_numpy(np.stack(columns, 2).astype(np.float32))


def render_batch(images: Tensor, table: Tensor, img_size: tuple[int, int]) -> Tensor:
    """One view of each image of a batch.

    Bilinear resizing with antialiasing is linear in the image's rows and in its columns, and so are cropping, padding
    and mirroring. A view is thus one matrix on either side of the image: the whole batch is two batched products,
    whatever its boxes.

    Args:
        images: uint8, (batch, height, channel, width): the layout in which neither product needs a copy.
        table: Of the batch, from `view_table`, on the same device.
        img_size: Height and width of the views.

    Returns:
        Values from 0 to 255, rounded as uint8 images are: float32, (batch, channel, height, width).
    """
    batch, height, channels, width = images.shape
    out_height, out_width = img_size
    down, along = _resize_matrix(table[:, 0], out_height, height), _resize_matrix(table[:, 1], out_width, width)
    with torch.autocast(images.device.type, enabled=False):
        view = torch.bmm(down, images.view(batch, height, channels * width).float())
        view = torch.bmm(view.view(batch, out_height * channels, width), along.mT)
    return view.round_().view(batch, out_height, channels, out_width).permute(0, 2, 1, 3)


def _resize_matrix(axis: Tensor, out: int, length: int) -> Tensor:
    """The matrices (batch, out, length) that take one axis of an image to that of its view."""
    start, box, resized, offset, flip = axis[:, :, None].unbind(1)  # each batch, 1
    pixel = torch.arange(out, device=axis.device)
    pixel = pixel + flip * (out - 1 - 2 * pixel) + offset  # batch, out
    ratio = box / resized
    centre = start + (pixel + 0.5) * ratio
    source = torch.arange(length, device=axis.device) + 0.5
    distance = (source - centre[:, :, None]).abs_().div_(ratio.clamp_min(1)[:, :, None])
    weight = (1 - distance).clamp_min_(0)  # batch, out, length: a triangle, as wide as the pixels that are merged
    weight.mul_(((source > start) & (source < start + box))[:, None])
    weight.div_(weight.sum(2, keepdim=True))
    return weight.masked_fill_(((pixel < 0) | (pixel >= resized))[:, :, None], 0)  # padding
