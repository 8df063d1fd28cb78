"""The colours of weights, and how they lie on an image: the same in the figure and in the explorer."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from PIL import Image

from gsanet.explain.maps import Array

INK, FAINT, MARK = "#1f2430", "#8a90a0", "#00b894"
# Of lines and bars that are to be told apart.
DISTINCT = "#3366cc", "#dd8800", "#109618", "#aa2266", "#0099c6", "#885522", "#66aa00", "#6633aa"
# Blue takes away, red adds, white is zero.
SIGNED = LinearSegmentedColormap.from_list("signed", ["#12408f", "#4f8be0", "#ffffff", "#ee6a50", "#9c1022"])
SIZES = LinearSegmentedColormap.from_list("sizes", ["#ffffff", "#cdb8ee", "#9063d6", "#5519a8"])
# How much a black pixel of the image darkens the colours over it: shapes are seen, and colours still read. Pixels as
# large as the map's need less.
SHADE, SHADE_OF_LARGE_PIXELS = 0.32, 0.16


def merge_heads(weights: Array, chosen: list[int]) -> Array:
    """The weights of one head; of several, the sum of their absolute values.

    Heads weight different channels, so that opposite signs do not cancel.
    """
    return weights[chosen[0]] if len(chosen) == 1 else np.abs(weights[chosen]).sum(0)


def limit_of(weights: Array) -> float:
    """The weight that gets the strongest colour."""
    return float(np.abs(weights).max()) or 1.0


def shade_of(image: Image.Image) -> Array:
    """How much each pixel of an image darkens the colours over it, from 0 to 1."""
    strength = SHADE_OF_LARGE_PIXELS if has_large_pixels(image) else SHADE
    return strength * (1 - np.asarray(image.convert("L"), np.float32) / 255)


def has_large_pixels(image: Image.Image) -> bool:
    """Whether an image is so small that its pixels are seen one by one."""
    return max(image.size) < 100
