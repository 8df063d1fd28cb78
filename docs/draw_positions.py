"""Draw docs/positions.svg: which embedding stands for which offset, and how far column and row attention reach.

python docs/draw_positions.py [FILE]
"""

from typing import Any

import matplotlib.pyplot as plt
from drawing import COLUMN, GREY, INK, LINES, ROW, arrow, save
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

LENGTH = 7  # pixels of a line
COLOURS = plt.get_cmap("RdYlBu_r")
TITLE: dict[str, Any] = {"loc": "left", "size": 11, "color": INK, "pad": 10}


def colour(offset: int) -> tuple[float, float, float, float]:
    return COLOURS(0.5 + 0.42 * offset / (LENGTH - 1))


def signed(offset: int) -> str:
    return f"{offset:+d}".replace("-", "\u2212") if offset else "0"


def cell(
    ax: Axes, x: float, y: float, offset: int | None, text: str = "", edge: str = LINES, size: float = 8.5
) -> None:
    """A square for one offset; an empty one for an offset out of reach."""
    face = "white" if offset is None else colour(offset)
    ax.add_patch(Rectangle((x, y), 1, 1, fc=face, ec=edge, lw=0.8))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center_baseline", size=size, color=INK)


def frame(ax: Axes, x: float, y: float) -> None:
    ax.add_patch(Rectangle((x, y), 1, 1, fc="none", ec=INK, lw=2, zorder=3))


def draw_windows(ax: Axes) -> None:
    """The table, and the part of it that the first, the middle and the last pixel of a line use."""
    ax.set_title("A table of $2L - 1$ embeddings; each pixel uses $L$ of them", **TITLE)
    for offset in range(1 - LENGTH, LENGTH):
        cell(ax, offset, 5.6, offset, signed(offset), edge=INK)
    ax.text(1 - LENGTH, 6.85, "$R$, one row for each offset $r = i - x$", size=10, color=INK)
    for line, x in enumerate((0, 3, 6)):
        y = 3.6 - 1.7 * line
        for i in range(LENGTH):
            cell(ax, i - x, y, i - x, f"i={i}", size=7)
        frame(ax, 0, y)
        ax.text(-x - 0.25, y + 0.5, f"$x = {x}$", ha="right", va="center", size=10, color=INK)
    ax.plot([0, 0], [-0.2, 5.5], color=GREY, lw=0.8, ls=":")
    ax.plot([1, 1], [-0.2, 5.5], color=GREY, lw=0.8, ls=":")
    ax.set(xlim=(-8.2, 7.2), ylim=(-0.4, 7.5))


def draw_matrix(ax: Axes, reach: int | None, title: str) -> None:
    """All pairs of a line: the same embedding along each diagonal."""
    ax.set_title(title, **TITLE)
    for x in range(LENGTH):
        for i in range(LENGTH):
            inside = reach is None or abs(i - x) <= reach
            cell(ax, i, LENGTH - 1 - x, i - x if inside else None, signed(i - x) if inside else "")
        frame(ax, x, LENGTH - 1 - x)
    ax.text(LENGTH / 2, -0.25, "attended to, $i$", ha="center", va="top", size=9.5, color=INK)
    ax.text(-0.25, LENGTH / 2, "attends, $x$", ha="right", va="center", rotation=90, size=9.5, color=INK)
    ax.set(xlim=(-1, LENGTH + 0.2), ylim=(-1, LENGTH + 0.2))


def draw_two_steps(ax: Axes) -> None:
    """From any pixel to any other: down its column, then along the row."""
    ax.set_title("Any pixel in two steps", **TITLE)
    pixel, far = (4, 5), (1, 1)  # row, column: the pixel that attends, and one that it takes from
    for row in range(LENGTH):
        for column in range(LENGTH):
            corner = (column, LENGTH - 1 - row)
            tint = ROW if row == pixel[0] else COLUMN if column == far[1] else None
            ax.add_patch(Rectangle(corner, 1, 1, fc=tint or "white", alpha=0.19 if tint else 1, lw=0))
            ax.add_patch(Rectangle(corner, 1, 1, fc="none", ec=LINES, lw=0.8))

    def middle(row: int, column: int) -> tuple[float, float]:
        return column + 0.5, LENGTH - 0.5 - row

    corner = (pixel[0], far[1])
    arrow(ax, middle(*far), middle(*corner), color=COLUMN, width=2)
    arrow(ax, middle(*corner), middle(*pixel), color=ROW, width=2)
    ax.plot(*middle(*far), "o", color=COLUMN, ms=6)
    frame(ax, pixel[1], LENGTH - 1 - pixel[0])
    ax.text(far[1] + 1.1, LENGTH - 0.5 - far[0], "$(i, j)$", va="center", size=9.5, color=COLUMN)
    on_column, on_row = "column layer\n$q_{xj} \\cdot R^c_{i-x}$", "row layer\n$q_{xy} \\cdot R^r_{j-y}$"
    ax.text(far[1] + 1.15, LENGTH - 2.05 - far[0], on_column, va="center", size=10.5, color=COLUMN, linespacing=1.5)
    ax.text(2.3, 1.85, on_row, va="top", size=10.5, color=ROW, linespacing=1.5)
    ax.text(pixel[1] + 0.5, LENGTH - pixel[0] + 0.12, "$(x, y)$", ha="center", va="bottom", size=9.5, color=INK)
    ax.set(xlim=(-1, LENGTH + 0.2), ylim=(-1, LENGTH + 0.2))


def draw() -> plt.Figure:
    figure, axes = plt.subplots(2, 2, figsize=(8.8, 7.2), layout="constrained")
    draw_windows(axes[0, 0])
    draw_matrix(axes[0, 1], None, "All pairs of a line: one embedding a diagonal")
    draw_matrix(axes[1, 0], 2, "With reach = 2: offsets beyond it contribute nothing")
    draw_two_steps(axes[1, 1])
    for ax in axes.flat:
        ax.set_aspect("equal")
        ax.axis("off")
    return figure


if __name__ == "__main__":
    save(draw, "positions.svg")
