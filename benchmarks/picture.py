"""Draw a file of results: the ratios beside their goals, one module beside its floor, and how it grows with the map.

python benchmarks/picture.py results/benchmarks/speed-h200.json speed.png

Of several files, the rows of a case are those of the last file that has it: what was measured again since.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import number, read_report

OURS, INK, GREY, GREEN = "#bc4c00", "#24292f", "#8c959f", "#1a7f37"
RIVALS = {"reference": "#0969da", "gsa-pytorch": "#8250df", "softmax attention": GREEN}


def draw(reports: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw whatever of them was measured.

    Args:
        reports: The contents of files of results; of a case that several have, the last one's rows count.
        file: Where to; its ending says the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    last = {row["case"]: report for report in reports for row in report["rows"]}
    rows = [row for report in reports for row in report["rows"] if last[row["case"]] is report]
    goals = [row for row in rows if row["goal"] is not None and row["goal_of"] == "ratio" and row["ratio"] is not None]
    module = [row for row in rows if row["case"] == "module" and row["sides"]]
    scaling = [row for row in rows if row["case"] == "scaling" and row["sides"]]
    units = list(dict.fromkeys(row["unit"] for row in scaling))
    passes = list(dict.fromkeys(row["what"].split(", ")[1] for row in module))
    lines = [line for line in (["goals"] * bool(goals), passes, units) if line]
    if not lines:
        raise ValueError("nothing to draw: no row of it has a ratio")
    heights = [0.5 * len(goals) + 1.2 if line == ["goals"] else 4.2 for line in lines]
    figure = Figure(figsize=(13, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, line in zip(parts, lines, strict=True):
        plots = part.subplots(1, len(line), squeeze=False)[0]
        for plot, what in zip(plots, line, strict=True):
            if what == "goals":
                _goals(plot, goals)
            elif what in passes:
                _module(plot, [row for row in module if row["what"].endswith(f", {what}")], what)
            else:
                _scaling(plot, [row for row in scaling if row["unit"] == what], what)
    figure.suptitle("; ".join(_title(report, reports, last) for report in reports), fontsize="small", color=GREY)
    figure.savefig(file, dpi=150)


def _title(report: dict[str, Any], reports: Sequence[dict[str, Any]], last: dict[str, dict[str, Any]]) -> str:
    """Where and by what it was measured, and from the second file on which cases."""
    facts = report["environment"]
    words = f"{facts['device']}, {report['dtype']}, torch {facts['torch']}, gsanet {facts['commit']}"
    cases = [case for case, owner in last.items() if owner is report]
    return words if report is reports[0] else f"{', '.join(cases)}: {words}"


def _goals(plot: Any, rows: Sequence[dict[str, Any]]) -> None:
    """How many times better than the other side: a bar to the right of 1 is ahead."""
    gains, names = [], []
    for place, row in enumerate(rows):
        higher = row["better"] == "higher"
        gain, goal, bound = (value if higher else 1 / value for value in (row["ratio"], row["goal"], row["must_beat"]))
        gains += [gain, goal, bound] if row["met"] else [gain]
        names.append(row["what"])
        plot.barh(place, gain - 1, left=1, color=OURS if gain >= 1 else "#e0a080", height=0.6)
        if row["met"]:
            plot.plot([bound, bound], [place - 0.4, place + 0.4], color=INK, lw=1.5)
            plot.plot([goal, goal], [place - 0.4, place + 0.4], color=GREEN, lw=2.5)
        sides = " / ".join(number(value) for value in row["sides"].values())
        plot.text(1.02, place, f"{sides} {row['unit']}", transform=plot.get_yaxis_transform(), va="center", size=9)
    plot.set_xscale("log", base=2)
    plot.set_xlim(0.8 * min([*gains, 1]), 1.25 * max([*gains, 1]))
    low, high = plot.get_xlim()
    ticks = [tick for tick in (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8, 16) if low <= tick <= high]
    plot.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    plot.minorticks_off()
    plot.axvline(1, color=GREY, lw=1)
    plot.set_yticks(range(len(rows)), names, fontsize=9)
    plot.set_ylim(len(rows) - 0.4, -0.6)
    title = "Times better than the other side"
    if any(row["met"] for row in rows):
        title += " (green: goal, black: must beat)"
    plot.set_title(title, fontsize="medium", loc="left")
    plot.grid(axis="x", alpha=0.3)


def _module(plot: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Times of all sides at each shape, above the floor of bytes."""
    names = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(rows))]
        values = [row["sides"].get(name, float("nan")) for row in rows]
        plot.bar(places, values, width, label=name, color=RIVALS.get(name, OURS))
    for place, row in enumerate(rows):
        label = "floor of bytes" if place == 0 else None
        plot.plot([place - 0.45, place + 0.45], [row["floors"]["bytes"]] * 2, color=INK, lw=2, label=label)
    plot.set_yscale("log")
    low, high = plot.get_ylim()
    plot.set_ylim(low, high * (high / low) ** 0.2)  # room for the legend
    plot.set_ylabel("ms")
    shapes = [row["what"].split(", ")[0] for row in rows]
    plot.set_xticks(range(len(rows)), shapes, rotation=30, fontsize=9, ha="right", rotation_mode="anchor")
    plot.set_title(f"One module, {title}", fontsize="medium", loc="left")
    plot.grid(axis="y", alpha=0.3)
    plot.legend(fontsize=8, ncols=3, loc="upper right")


def _scaling(plot: Any, rows: Sequence[dict[str, Any]], unit: str) -> None:
    """Log-log: a straight line is a power of the number of pixels."""
    sizes = {row["what"]: int(row["what"].split("x")[0]) for row in rows}
    for name in dict.fromkeys(side for row in rows for side in row["sides"]):
        points = [(sizes[row["what"]] ** 2, row["sides"][name]) for row in rows if name in row["sides"]]
        plot.plot(*zip(*points, strict=True), marker="o", label=name, color=RIVALS.get(name, OURS))
    plot.set_xscale("log")
    plot.set_yscale("log")
    ticks = sorted(set(sizes.values()))
    plot.set_xticks([size**2 for size in ticks], [f"{size}x{size}" for size in ticks], fontsize=9)
    plot.minorticks_off()
    plot.set_xlabel("pixels")
    plot.set_ylabel(unit)
    what = "Time" if unit.startswith("ms") else "Memory"
    plot.set_title(f"{what} of one module, 64 channels, forward + backward", fontsize="medium", loc="left")
    plot.grid(alpha=0.3)
    plot.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw([read_report(file) for file in arguments.results], arguments.picture)


if __name__ == "__main__":
    main()
