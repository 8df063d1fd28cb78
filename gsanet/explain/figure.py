"""The picture of an explanation: where one pixel's output comes from, laid over the image."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from gsanet.explain.colours import (
    DISTINCT,
    FAINT,
    INK,
    MARK,
    SIGNED,
    SIZES,
    has_large_pixels,
    limit_of,
    merge_heads,
    shade_of,
)
from gsanet.explain.image import ImageExplanation, place_of
from gsanet.explain.maps import Array

STYLES = "-", "--", ":"  # of the heads after the eighth, and after the sixteenth
SMALL_PER_LINE = 8


def draw(found: ImageExplanation, file: Path, head: int | None = None) -> None:
    """Draw an explanation.

    Above, the image and the weights that lie on it, of one head with their signs, or of all heads as the sum of their
    absolute values: the heads weight different channels, so that opposite signs do not cancel. Below, the weights along
    the row and the column of the pixel, and each head for itself.

    Args:
        found: What to draw.
        file: Where to; its ending says the format.
        head: Which head, counted from 1; None for all.
    """
    explanation = found.explanation
    heads = len(explanation.values)
    if head is not None and not 1 <= head <= heads:
        raise ValueError(f"head must be from 1 to {heads}, got {head}")
    chosen = list(range(heads)) if head is None else [head - 1]
    small = [
        (title, weights)
        for title, weights in (("content", explanation.content), ("position", explanation.scaled_positional))
        if weights is not None
    ]
    with_small = head is None and heads > 1
    lines = -(-heads // SMALL_PER_LINE) * len(small) if with_small else 0
    ratio = _height_by_width(found)
    tall = 2.85 * min(max(ratio, 0.6), 1.6) + 0.35
    small_tall = (1.5 * min(max(ratio, 0.6), 1.6) + 0.2) * lines
    curves_tall = 2.1 if explanation.column is not None or explanation.row is not None else 0.0
    figure = Figure(
        figsize=(14, tall + curves_tall + small_tall + 1.0), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    )
    FigureCanvasAgg(figure)
    heights = [height for height in (tall, curves_tall, small_tall) if height]
    parts = iter(np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights)))  # type: ignore[arg-type]
    _draw_maps(next(parts), found, chosen)
    if curves_tall:
        _draw_curves(next(parts), found, chosen)
    if with_small:
        _draw_heads(next(parts), found, small)
    # A class may be called anything: dollars would be taken for formulas.
    figure.suptitle(_title(found, head), color=INK, fontsize=12.5, parse_math=False)
    figure.savefig(file, dpi=110)


def _title(found: ImageExplanation, head: int | None) -> str:
    explanation = found.explanation
    height, width = explanation.size
    which = "all heads" if head is None else f"head {head}"
    guess = f"“{found.guess.name}”, {found.guess.probability:.1%}"
    return (
        f"{found.network} sees class {guess}.  Where pixel {found.at[0]},{found.at[1]} takes from in "
        f"{place_of(explanation.module)} ({which}, map {height}x{width})"
    )


def _draw_maps(part: Any, found: ImageExplanation, chosen: list[int]) -> None:
    """The image, and the maps of the chosen heads over it, each on its own scale."""
    explanation = found.explanation
    content, positional = explanation.content, explanation.scaled_positional
    shown = [("content", content), ("position, column times row", positional)]
    if content is not None and positional is not None:
        shown.append(("content + position", explanation.total))
    panels = [(title, merge_heads(weights, chosen)) for title, weights in shown if weights is not None]
    axes = part.subplots(1, 1 + len(panels))
    _draw_image(axes[0], found)
    signed = len(chosen) == 1
    for axis, (title, weights) in zip(axes[1:], panels, strict=True):
        scale = _overlay(axis, found, weights, signed, limit_of(weights))
        axis.set_title(title, fontsize=11, color=INK)
        bar = part.colorbar(scale, ax=axis, shrink=0.9, aspect=24, pad=0.02)
        bar.ax.tick_params(labelsize=8, colors=FAINT)
        bar.outline.set_visible(False)
        bar.set_label("weight" if signed else "sum of |weight| over heads", fontsize=8, color=FAINT)


def _draw_image(axis: Any, found: ImageExplanation) -> None:
    """All of the image; what the network does not see is veiled."""
    width, height = found.image.size
    left, top, right, bottom = found.view.box
    axis.imshow(found.image, extent=(0, width, height, 0), interpolation=_interpolation(found))
    veil = np.zeros((height, width, 4), np.float32)
    veil[..., :3] = 1
    veil[..., 3] = 0.65
    rows, columns = np.arange(height) + 0.5, np.arange(width) + 0.5
    seen = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    veil[seen, 3] = 0
    if not seen.all():
        axis.imshow(veil, extent=(0, width, height, 0), interpolation="nearest")
        axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=INK, linewidth=0.8))
    _mark(axis, found)
    axis.plot(found.at[0] + 0.5, found.at[1] + 0.5, "+", color=MARK, markersize=9, markeredgewidth=2)
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_title("image, and the pixel", fontsize=11, color=INK)
    _bare(axis)


def _overlay(axis: Any, found: ImageExplanation, weights: Array, signed: bool, limit: float) -> ScalarMappable:
    """Weights over the part of the image that the network sees, which shades their colours; gives the colour scale."""
    left, top, right, bottom = found.view.box
    width, height = found.image.size
    scale = ScalarMappable(Normalize(-limit if signed else 0.0, limit), SIGNED if signed else SIZES)
    axis.imshow(weights, extent=(left, right, bottom, top), cmap=scale.cmap, norm=scale.norm, interpolation="nearest")
    shade = np.zeros((height, width, 4), np.float32)
    shade[..., 3] = shade_of(found.image)
    axis.imshow(shade, extent=(0, width, height, 0), interpolation=_interpolation(found))
    _mark(axis, found)
    axis.set(xlim=(left, right), ylim=(bottom, top))
    _bare(axis)
    return scale


def _interpolation(found: ImageExplanation) -> str:
    return "nearest" if has_large_pixels(found.image) else "antialiased"


def _cell(found: ImageExplanation) -> tuple[float, float, float, float]:
    """Left, top, width and height of the map's pixel in the image."""
    left, top, right, bottom = found.view.box
    (rows, columns), (x, y) = found.explanation.size, found.explanation.pixel
    width, height = (right - left) / columns, (bottom - top) / rows
    return left + y * width, top + x * height, width, height


def _mark(axis: Any, found: ImageExplanation) -> None:
    left, top, width, height = _cell(found)
    for colour, line in (("white", 3.4), (MARK, 1.8)):  # to be seen on any colour
        axis.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=colour, linewidth=line, zorder=5))


def _draw_curves(part: Any, found: ImageExplanation, chosen: list[int]) -> None:
    """The positional weights as they are, before they are multiplied: along the row, and down the pixel's column."""
    explanation = found.explanation
    x, y = explanation.pixel
    curves: list[tuple[str, str, Array, int]] = []
    if explanation.row is not None:
        curves.append(("weights of the row", "column j of the map", explanation.row, y))
    if explanation.column is not None:
        curves.append(("weights of the pixel's column", "row i of the map", explanation.column[:, y], x))
    axes = np.atleast_1d(part.subplots(1, len(curves)))
    for axis, (title, label, weights, here) in zip(axes, curves, strict=True):
        axis.axhline(0, color=FAINT, linewidth=0.8)
        axis.axvline(here, color=MARK, linewidth=1.6, alpha=0.8)
        for head in chosen:
            colour = DISTINCT[head % len(DISTINCT)]
            style = STYLES[head // len(DISTINCT) % len(STYLES)]
            marker = "o" if weights.shape[1] <= 32 else ""
            axis.plot(
                weights[head], style, color=colour, linewidth=1.5, marker=marker, markersize=3, label=f"{head + 1}"
            )
        axis.set_title(title, fontsize=11, color=INK)
        axis.set_xlabel(label, fontsize=9, color=FAINT)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.margins(x=0.02)
        axis.tick_params(labelsize=8, colors=FAINT)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color("#cfd3dc")
    if 1 < len(chosen) <= len(DISTINCT) * len(STYLES):
        columns = -(-len(chosen) // len(DISTINCT))
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
        axes[-1].legend(title="head", ncols=columns, fontsize=8, title_fontsize=8, frameon=False, **place)


def _draw_heads(part: Any, found: ImageExplanation, small: list[tuple[str, Array]]) -> None:
    """Each head for itself, with signs; each kind of weight on one scale for all heads."""
    heads = len(found.explanation.values)
    lines = -(-heads // SMALL_PER_LINE)
    columns = min(heads, SMALL_PER_LINE)
    axes: NDArray[Any] = part.subplots(lines * len(small), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for kind, (title, weights) in enumerate(small):
        for head in range(heads):
            line, column = divmod(head, columns)
            axis = axes[kind * lines + line, column]
            axis.set_visible(True)
            scale = _overlay(axis, found, weights[head], True, limit_of(weights))
            if kind == 0 or lines > 1:
                axis.set_title(f"head {head + 1}", fontsize=9, color=INK)
            if column == 0:
                axis.set_ylabel(title, fontsize=9, color=INK)
        bar = part.colorbar(scale, ax=axes[kind * lines : (kind + 1) * lines], aspect=14 * lines, pad=0.01)
        bar.ax.tick_params(labelsize=7, colors=FAINT)
        bar.outline.set_visible(False)


def _height_by_width(found: ImageExplanation) -> float:
    left, top, right, bottom = found.view.box
    return (bottom - top) / (right - left)


def _bare(axis: Any) -> None:
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)
