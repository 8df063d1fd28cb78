"""Draw docs/costs.svg: the two orders of one product, to scale, and the operations of each layer, counted.

python docs/draw_costs.py [FILE]
"""

import matplotlib.pyplot as plt
from costs import operations
from drawing import COLUMN, CONTENT, GREY, INK, save
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

PIXELS, CHANNELS = 196, 32  # a map of 14x14, and a head
SIDES = (7, 14, 28, 56, 112)
DIM = 64
TIMES = "$\\times$"
STYLES = {  # colour, line, and how far above its end the name stands
    "all pairs of pixels": (GREY, "--", 0),
    "3x3 convolution": (INK, ":", 5),
    "column and row": (COLUMN, "-", -6),
    "content": (CONTENT, "-", 0),
}


def matrix(ax: Axes, x: float, y: float, rows: float, columns: float, name: str, color: str = INK) -> float:
    """A matrix as a rectangle to scale, centred at the height y; gives where it ends."""
    ax.add_patch(Rectangle((x, y - rows / 2), columns, rows, fc=color, alpha=0.18, lw=0))
    ax.add_patch(Rectangle((x, y - rows / 2), columns, rows, fc="none", ec=color, lw=1.4))
    ax.text(x + columns / 2, y + rows / 2 + 5, name, ha="center", va="bottom", size=10, color=color)
    return x + columns


def sign(ax: Axes, x: float, y: float, text: str) -> float:
    ax.text(x + 14, y, text, ha="center", va="center", size=14, color=INK)
    return x + 28


def chain(ax: Axes, y: float, color: str, *parts: tuple[int, int, str] | str) -> None:
    """Matrices, as (rows, columns, name), and signs between them; what lies between the two products has a colour."""
    x = 0.0
    for part in parts:
        if isinstance(part, str):
            x = sign(ax, x, y, part)
        else:
            x = matrix(ax, x, y, *part, color if part[2] in ("scores", "$C$") else INK)


def draw_products(ax: Axes) -> None:
    ax.set_title(
        f"One head of {CHANNELS} channels on {PIXELS} pixels (14x14), to scale", loc="left", size=11, color=INK
    )
    n, c = PIXELS, CHANNELS
    ax.text(0, 412, "All pairs first: a score for every pair of pixels", size=10.5, color=INK)
    scores = (n, n, "scores")
    chain(
        ax, 265, GREY, (n, c, "$Q$"), TIMES, (c, n, "$K^\\top$"), "=", scores, TIMES, (n, c, "$V$"), "=", (n, c, "$Y$")
    )
    ax.text(0, 98, "Keys and values first: a context $C$ of 32x32, whatever the map", size=10.5, color=CONTENT)
    first = ((c, n, "$\\rho(K)^\\top$"), TIMES, (n, c, "$V$"), "=", (c, c, "$C$"))
    then = ((n, c, "$Q$"), TIMES, (c, c, "$C$"), "=", (n, c, "$Y$"))
    chain(ax, -45, CONTENT, *first, ",", *then)
    ax.set(xlim=(-5, 615), ylim=(-150, 440), aspect="equal")
    ax.axis("off")


def draw_counts(ax: Axes) -> None:
    counted = [operations(DIM, side) for side in SIDES]
    for row in counted:
        row["column and row"] = row["column"] + row["row"]
    for layer, (color, style, up) in STYLES.items():
        values = [row[layer] / 1e6 for row in counted]
        ax.loglog(SIDES, values, color=color, ls=style, marker="o", ms=4)
        end = (SIDES[-1], values[-1])
        ax.annotate(layer, end, (7, up), textcoords="offset points", va="center", color=color, size=10)
    ax.set_title(f"Operations of one layer with {DIM} channels, counted", loc="left", size=11, color=INK)
    ax.set_xticks(SIDES, [f"{side}x{side}" for side in SIDES])
    ax.minorticks_off()
    ax.set_xlabel("map")
    ax.set_ylabel("millions")
    ax.set_xlim(6.3, 420)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)


def draw() -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.1), layout="constrained", width_ratios=(1.2, 1))
    draw_products(left)
    draw_counts(right)
    return figure


if __name__ == "__main__":
    save(draw, "costs.svg")
