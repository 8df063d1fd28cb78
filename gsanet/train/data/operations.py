"""The operations on pixels that `gsanet.train.data.policy` chooses from, each on many images at once.

Those that share their arithmetic are a family, and one function. It takes the images of the family (values from 0 to
255, float32, (n, 3, height, width)), sorted by operation; their rows of `Operations.values`; and how many images there
are of each operation. It returns the images changed, still from 0 to 255, but not rounded.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

LUMA = (0.299, 0.587, 0.114)  # of red, green, blue in grey


def keep(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """Nothing."""
    return images


def move(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """Shear, translate, rotate: what comes from outside is black."""
    y, x = (torch.linspace(1 / n - 1, 1 - 1 / n, n, device=images.device) for n in images.shape[2:])
    by_x, by_y, by_1 = values[:, None, None, :6].unflatten(3, (2, 3)).unbind(4)  # each batch, 1, 1, 2
    # Not a matrix product, which a GPU may round to 10 bits: that is a visible fraction of a pixel.
    grid = by_x * x[:, None] + (by_y * y[:, None, None] + by_1)  # batch, height, width, 2
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def blend(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """Brightness, color, contrast, sharpness: towards a picture that has none of it, or away from that."""
    _, color, contrast, sharpness = images.split(list(counts))
    without = torch.zeros_like(images)
    _, no_color, no_contrast, no_sharpness = without.split(list(counts))
    no_color.copy_(_grey(color))
    sums = contrast.sum((2, 3), keepdim=True, dtype=torch.int64)  # of whole numbers: exact, in whatever order
    no_contrast.copy_(_grey(sums / images[0, 0].numel()))
    no_sharpness.copy_(_blur(sharpness))
    return torch.lerp(without, images, _strength(values)).clamp_(0, 255)


def _strength(values: Tensor) -> Tensor:
    return values[:, 6, None, None, None]  # n, 1, 1, 1


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.split(1, 1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def _blur(images: Tensor) -> Tensor:
    """Each pixel five times and its neighbours once; the border stays."""
    blurred = images.clone()
    if len(images) and min(images.shape[2:]) > 2:
        # Not a convolution, which cuDNN would tune anew for every number of images.
        around = F.avg_pool2d(images, 3, stride=1)
        blurred[:, :, 1:-1, 1:-1].mul_(4 / 13).add_(around, alpha=9 / 13)
    return blurred


def posterize(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """Fewer bits."""
    return images - images.remainder(_strength(values))


def solarize(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """What is bright is inverted."""
    return torch.where(images < _strength(values), images, 255 - images)


def autocontrast(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """Each channel is stretched to the whole range; one of a single value stays."""
    low, high = images.flatten(2).aminmax(dim=2, keepdim=True)
    low, high = low[..., None], high[..., None]
    return torch.where(low < high, (images - low) * 255 / (high - low), images)


def equalize(images: Tensor, values: Tensor, counts: Sequence[int]) -> Tensor:
    """The values of each channel become equally frequent, as far as possible."""
    return vision.equalize(images.to(torch.uint8)).float()


FAMILIES: dict[Callable[[Tensor, Tensor, Sequence[int]], Tensor], tuple[str, ...]] = {
    keep: ("identity",),
    move: ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    blend: ("brightness", "color", "contrast", "sharpness"),
    posterize: ("posterize",),
    solarize: ("solarize",),
    autocontrast: ("autocontrast",),
    equalize: ("equalize",),
}
