"""What the pictures share: colours, arrows, and a way to save them in which the same script draws the same bytes."""

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, GREY, LINES = "#24292f", "#8c959f", "#d0d7de"
CONTENT, COLUMN, ROW = "#bc4c00", "#0969da", "#1a7f37"


def arrow(ax: Axes, *points: tuple[float, float], label: str = "", color: str = INK, width: float = 1.3) -> None:
    """A line through the points with a head at the last."""
    xs, ys = zip(*points[:-1], strict=True)
    ax.plot([*xs], [*ys], color=color, lw=width, solid_capstyle="round")
    ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "color": color, "lw": width})
    if label:
        (x0, y0), (x1, y1) = points[-2:]
        ax.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.1, label, ha="center", va="bottom", color=color, size=11)


def save(draw: Callable[[], plt.Figure], name: str) -> None:
    """Draw into the file that the command line names, or into docs/NAME."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(name)
    # A fixed salt and no date: the same script draws the same bytes.
    with mpl.rc_context({"svg.hashsalt": "gsanet", "svg.fonttype": "path", "mathtext.fontset": "cm"}):
        metadata = {"Date": None} if target.suffix == ".svg" else None
        draw().savefig(target, bbox_inches="tight", facecolor="white", metadata=metadata)
    print(f"drawn: {target}")
