"""Weights and pictures as small images that stand in the page itself (data addresses)."""

import base64
import io

import numpy as np
from matplotlib.colors import Colormap, to_hex
from PIL import Image

from gsanet.explain.colours import SIGNED, SIZES, has_large_pixels, shade_of
from gsanet.explain.maps import Array
from gsanet.explore.study import Subject

SHADED = 320  # pixels of the longer side of the picture below the weights, at most


def heat_map(weights: Array, limit: float, signed: bool) -> str:
    """Weights as colours, one pixel each, from -limit or 0 to limit; the browser makes them larger."""
    share = (weights / limit + 1) / 2 if signed else weights / limit
    colours = (SIGNED if signed else SIZES)(share, bytes=True)[..., :3]
    return _address(Image.fromarray(np.ascontiguousarray(colours)), "PNG")


def picture(subject: Subject) -> str:
    """The picture as it is displayed."""
    return _address(subject.displayed, "PNG" if has_large_pixels(subject.displayed) else "JPEG")


def shade(subject: Subject) -> str:
    """What the network sees of the picture, in the grey by which the colours over it are multiplied."""
    image = subject.displayed
    scale = image.width / subject.view.size[1], image.height / subject.view.size[0]
    left, top, right, bottom = (edge * scale[axis % 2] for axis, edge in enumerate(subject.view.box))
    width, height = right - left, bottom - top
    grey = Image.fromarray(np.rint(255 * (1 - shade_of(image))).astype(np.uint8))
    if not has_large_pixels(image):
        smaller = min(1.0, SHADED / max(width, height))
        size = max(1, round(width * smaller)), max(1, round(height * smaller))
        grey = grey.resize(size, Image.Resampling.LANCZOS, (left, top, right, bottom))
    else:
        grey = grey.crop((round(left), round(top), round(right), round(bottom)))
    return _address(grey, "PNG" if has_large_pixels(image) else "JPEG")


def thumbnail(image: Image.Image, side: int) -> str:
    """The middle of an image, a square that is no larger than this."""
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    square = image.crop((left, top, left + edge, top + edge))
    square.thumbnail((side, side))
    return _address(square, "PNG" if has_large_pixels(image) else "JPEG")


def gradient(signed: bool) -> str:
    """The colours of the scale from left to right, for CSS."""
    colours: Colormap = SIGNED if signed else SIZES
    return f"linear-gradient(to right, {', '.join(to_hex(colours(place)) for place in np.linspace(0, 1, 9))})"


def _address(image: Image.Image, kind: str) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, quality=88)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"
