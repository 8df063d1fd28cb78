"""What is done to images before a network sees them: batches in [0, 1] in, batches in [0, 1] out.

Images are (batch, 3, height, width), and stay so, on their device. Nothing is drawn anew: the same batch always becomes
the same batch, on every device but for rounding. Lengths are shares of the side, so that a change looks the same at
every image size.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

Change = Callable[[Tensor], Tensor]

NOISE = 0.06  # standard deviation
BLUR = 1 / 64  # standard deviation, of the shorter side
SEED = 12  # with which no square of 2x2 or 4x4 stays in its place


def unchanged(images: Tensor) -> Tensor:
    """The images."""
    return images


def zoom_in(images: Tensor, share: float) -> Tensor:
    """The middle of the images, enlarged to their size.

    Args:
        images: In [0, 1].
        share: Of each side that is still seen, at most 1.
    """
    height, width = images.shape[2:]
    rows, columns = (max(1, round(share * side)) for side in (height, width))
    top, left = (height - rows) // 2, (width - columns) // 2
    return _resize(images[..., top : top + rows, left : left + columns], (height, width))


def zoom_out(images: Tensor, share: float) -> Tensor:
    """The images with their reflection around them, reduced to their size.

    Args:
        images: In [0, 1].
        share: Of each side that the images and their reflection have, at least 1.
    """
    down, along = (max(1, round((share - 1) / 2 * side)) for side in images.shape[2:])
    return _resize(F.pad(images, (along, along, down, down), mode="reflect"), images.shape[2:])


def shift(images: Tensor, share: float) -> Tensor:
    """The images moved to the right, to the left, down and up, one after the other; their reflection moves in.

    Args:
        images: In [0, 1].
        share: Of the side.
    """
    height, width = images.shape[2:]
    down, along = (max(1, round(share * side)) for side in (height, width))
    padded = F.pad(images, (along, along, down, down), mode="reflect")
    moved = torch.empty_like(images)
    for first, (top, left) in enumerate(((down, 0), (down, 2 * along), (0, along), (2 * down, along))):
        moved[first::4] = padded[first::4, :, top : top + height, left : left + width]
    return moved


def flip(images: Tensor) -> Tensor:
    """Left and right exchanged."""
    return images.flip(3)


def grey(images: Tensor) -> Tensor:
    """Brightness alone, in all channels."""
    return transforms.rgb_to_grayscale(images, num_output_channels=3)


def noise(images: Tensor) -> Tensor:
    """Gaussian noise, another in each pixel, channel and image of the batch; cut off at 0 and 1."""
    drawn = torch.randn(images.shape, generator=torch.Generator().manual_seed(SEED))  # on the CPU: alike everywhere
    return (images + NOISE * drawn.to(images)).clamp_(0, 1)


def blur(images: Tensor) -> Tensor:
    """A gaussian's mean around each pixel."""
    deviation = BLUR * min(images.shape[2:])
    size = 2 * max(1, round(3 * deviation)) + 1
    return transforms.gaussian_blur(images, [size, size], [deviation, deviation])


def shuffle(images: Tensor, parts: int) -> Tensor:
    """Cut into squares, which change places, all images alike; what the cut leaves at the right and below stays.

    Args:
        images: In [0, 1].
        parts: How many squares, along and down.
    """
    batch, channels, height, width = images.shape
    down, along = height // parts, width // parts
    order = torch.randperm(parts**2, generator=torch.Generator().manual_seed(SEED)).to(images.device)
    squares = images[..., : parts * down, : parts * along].reshape(batch, channels, parts, down, parts, along)
    squares = squares.transpose(3, 4).flatten(2, 3)[:, :, order]  # batch, channel, square, down, along
    shuffled = images.clone()
    shuffled[..., : parts * down, : parts * along] = (
        squares.unflatten(2, (parts, parts)).transpose(3, 4).reshape(batch, channels, parts * down, parts * along)
    )
    return shuffled


CHANGES: dict[str, Change] = {
    "unchanged": unchanged,
    "zoom-in-7/8": partial(zoom_in, share=7 / 8),
    "zoom-in-3/4": partial(zoom_in, share=3 / 4),
    "zoom-out-5/4": partial(zoom_out, share=5 / 4),
    "shift-1/16": partial(shift, share=1 / 16),
    "shift-1/8": partial(shift, share=1 / 8),
    "shift-1/4": partial(shift, share=1 / 4),
    "flip": flip,
    "grey": grey,
    "noise": noise,
    "blur": blur,
    "shuffle-2x2": partial(shuffle, parts=2),
    "shuffle-4x4": partial(shuffle, parts=4),
}


def _resize(images: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(images, size=tuple(size), mode="bilinear", antialias=True, align_corners=False)
