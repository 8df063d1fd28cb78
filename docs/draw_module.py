"""Draw the GSA module, docs/module.svg: what flows where, and what one output pixel sees in each layer.

python docs/draw_module.py [FILE]
"""

import matplotlib.pyplot as plt
import numpy as np
from drawing import COLUMN, CONTENT, GREY, INK, LINES, ROW, arrow, save
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

PIXEL = (2, 4)  # the output pixel whose view is drawn: row, column
GRID = 7


def box(ax: Axes, x: float, y: float, w: float, h: float, text: str, color: str = INK, size: float = 11) -> None:
    ax.add_patch(FancyBboxPatch((x, y), w, h, "round,pad=0,rounding_size=0.12", fc="white", ec=color, lw=1.6))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=color, size=size, linespacing=1.35)


def view(ax: Axes, x: float, y: float, weights: np.ndarray, color: str, caption: str) -> None:
    """A small map: how strongly the marked pixel draws on every other."""
    cell = 0.155
    for row in range(GRID):
        for column in range(GRID):
            corner = (x + column * cell, y + (GRID - 1 - row) * cell)
            ax.add_patch(Rectangle(corner, cell, cell, fc=color, alpha=float(weights[row, column]), lw=0))
            ax.add_patch(Rectangle(corner, cell, cell, fc="none", ec=LINES, lw=0.5))
    corner = (x + PIXEL[1] * cell, y + (GRID - 1 - PIXEL[0]) * cell)
    ax.add_patch(Rectangle(corner, cell, cell, fc="none", ec=INK, lw=1.8))
    ax.text(x + GRID * cell / 2, y - 0.12, caption, ha="center", va="top", color=color, size=9, linespacing=1.3)


def views() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights of content, of the column alone, and of column then row."""
    random = np.random.default_rng(3)
    content = 0.12 + 0.75 * random.random((GRID, GRID)) ** 2
    along_column = np.exp(-np.abs(np.arange(GRID) - PIXEL[0]) / 2.2)
    along_row = np.exp(-np.abs(np.arange(GRID) - PIXEL[1]) / 2.2)
    column = np.zeros((GRID, GRID))
    column[:, PIXEL[1]] = 0.85 * along_column
    return content, column, 0.9 * np.outer(along_column, along_row)


def draw() -> plt.Figure:
    figure, ax = plt.subplots(figsize=(11.6, 6.0))
    ax.set(xlim=(0, 14.6), ylim=(0.1, 7.0), aspect="equal")
    ax.axis("off")
    content, column, both = views()

    ax.text(0.0, 4.2, "feature map $X$\n$H \\times W \\times d$", va="center", size=11)
    arrow(ax, (1.85, 4.2), (2.3, 4.2))
    box(ax, 2.3, 3.1, 1.15, 2.2, "$1{\\times}1$\nconv\n\n8 heads")

    # Content attention
    arrow(ax, (3.45, 5.0), (3.8, 5.0), (3.8, 6.25), (4.95, 6.25), label="$K, V$", color=CONTENT)
    box(ax, 4.95, 5.7, 3.1, 1.1, "context $C = \\rho(K)^{\\top} V$\nsoftmax $\\rho$ over all pixels", CONTENT, 10.5)
    arrow(ax, (8.05, 6.25), (9.2, 6.25), color=CONTENT)
    box(ax, 9.2, 5.7, 1.75, 1.1, "$Q\\,C$", CONTENT, 13)

    # Queries go to all three layers
    ax.text(4.1, 4.28, "$Q$", color=GREY, size=12, ha="center", va="bottom")
    arrow(ax, (3.45, 4.2), (10.05, 4.2), (10.05, 5.7), color=GREY)
    arrow(ax, (5.85, 4.2), (5.85, 3.05), color=GREY)
    arrow(ax, (10.05, 4.2), (10.05, 3.05), color=GREY)
    for x in (5.85, 10.05):
        ax.plot(x, 4.2, "o", ms=3.5, color=GREY)

    # Positional attention
    arrow(ax, (3.45, 3.4), (3.8, 3.4), (3.8, 2.5), (4.95, 2.5), label="$V$", color=COLUMN)
    box(ax, 4.95, 1.95, 1.8, 1.1, "column PA\n$(Q R^{c\\top})\\,V$", COLUMN)
    arrow(ax, (6.75, 2.5), (7.6, 2.5), color=COLUMN)
    box(ax, 7.6, 2.12, 0.8, 0.76, "BN")
    arrow(ax, (8.4, 2.5), (9.2, 2.5), color=ROW)
    box(ax, 9.2, 1.95, 1.75, 1.1, "row PA\n$(Q R^{r\\top})\\,V'$", ROW)

    # Fusion
    arrow(ax, (10.95, 6.25), (11.9, 6.25), (11.9, 4.52), color=CONTENT)
    arrow(ax, (10.95, 2.5), (11.9, 2.5), (11.9, 3.88), color=ROW)
    ax.text(11.9, 4.2, "+", ha="center", va="center_baseline", size=17, color=INK)
    ax.add_patch(plt.Circle((11.9, 4.2), 0.3, fc="none", ec=INK, lw=1.6))
    arrow(ax, (12.2, 4.2), (12.75, 4.2))
    ax.text(12.85, 4.2, "output $Y$\n$H \\times W \\times d$", va="center", size=11)

    # What the framed pixel sees
    view(ax, 12.6, 5.72, content, CONTENT, "content: every pixel,\nwherever it is")
    view(ax, 5.3, 0.65, column, COLUMN, "its column")
    view(ax, 9.53, 0.65, both, ROW, "then every pixel, by position")
    return figure


if __name__ == "__main__":
    save(draw, "module.svg")
