"""The picture of a stress test: an image under each change, above the accuracies of the networks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from gsanet.explain.colours import DISTINCT, FAINT, INK, has_large_pixels
from gsanet.stress.changes import Change
from gsanet.stress.measure import Stressed

INCHES = 1.05  # of an image


def draw(
    found: Sequence[Stressed], labels: Sequence[str], changes: Mapping[str, Change], image: Tensor, file: Path
) -> None:
    """Draw what was found of networks under the same changes.

    Args:
        found: One for each network.
        labels: What to call them.
        changes: Those that they were measured under.
        image: In [0, 1], (1, 3, height, width).
        file: Where to; its ending says the format.
    """
    # Room for a few images, whatever is drawn: the legend and the title need it.
    figure = Figure(figsize=(0.8 + INCHES * max(5, len(changes)), 4.0))
    FigureCanvasAgg(figure)
    axis: Any = figure.add_axes((0.7 / figure.get_figwidth(), 0.17, 1 - 0.8 / figure.get_figwidth(), 0.46))
    _draw_bars(axis, found, labels, list(changes))
    for place, change in enumerate(changes.values()):
        # In the axis' own places: each image stands exactly above its bars.
        above = axis.inset_axes((place - 0.46, 1.03, 0.92, 0.55), transform=axis.get_xaxis_transform())
        _draw_image(above, change(image)[0])
    figure.suptitle(f"Top-1 on {found[0].images:,} images, changed", color=INK, fontsize=12, y=0.985)
    figure.savefig(file, dpi=110)


def _draw_bars(axis: Any, found: Sequence[Stressed], labels: Sequence[str], changes: Sequence[str]) -> None:
    """One group for each change, one bar for each network; a line where its unchanged images stand."""
    width = 0.84 / len(found)
    for number, (row, label) in enumerate(zip(found, labels, strict=True)):
        colour = DISTINCT[number % len(DISTINCT)]
        left = (number + 0.5) * width - 0.42
        heights = [row.accuracies[name].top1 for name in changes]
        bars = axis.bar([place + left for place in range(len(changes))], heights, 0.92 * width, color=colour)
        axis.bar_label(bars, fmt="%.0f", fontsize=8, color=FAINT, padding=1)
        axis.axhline(row.accuracies["unchanged"].top1, color=colour, linewidth=0.8, linestyle=":", zorder=0)
        bars.set_label(label)
    axis.set(xlim=(-0.5, len(changes) - 0.5), ylabel="%")
    axis.margins(y=0.12)
    axis.set_xticks(range(len(changes)), changes)
    axis.yaxis.label.set_color(FAINT)
    axis.tick_params(axis="x", length=0, labelsize=9, colors=INK)
    axis.tick_params(axis="y", labelsize=8, colors=FAINT)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#cfd3dc")
    legend = axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=9, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a file may be called anything: dollars would be taken for formulas


def _draw_image(axis: Any, image: Tensor) -> None:
    picture = transforms.to_pil_image(image.cpu())
    axis.imshow(picture, interpolation="nearest" if has_large_pixels(picture) else "antialiased")
    axis.set_anchor("S")
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)
