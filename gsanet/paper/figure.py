"""The paper's kind of plot: accuracy against parameters, operations, and time of one image or throughput."""

import importlib.util
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

from gsanet.bench import BenchRow
from gsanet.models import list_models
from gsanet.paper.compare import Setting
from gsanet.paper.matrix import matrix
from gsanet.paper.printed import Network, printed_tables
from gsanet.paper.results import Results, Run, plain_network
from gsanet.paper.tables import alike, summarise

Point = tuple[str, float, float]  # a network's name, and where it stands

PRINTED = "ImageNet, as the paper prints"
COLOURS = {"gsa": "tab:red", "conv": "tab:gray"}
OTHERS = "tab:blue"


def accuracies(network: Network, results: Results) -> dict[str, float]:
    """What is known of a network's top-1 accuracy, in percent: from the paper's tables, and from runs, by setting.

    Runs by which a recipe was chosen, or made for a question of their own, are left out, as in the tables.
    """
    known: dict[str, float] = {}
    for table in printed_tables().values():
        for row in table.rows:
            if row.network == network and (top1 := row.number("top1")) is not None:
                known[PRINTED] = top1
    runs = [run for run in results.runs if run.network == network and not (run.holdout or run.question)]
    for same in map(summarise, alike(runs).values()):
        known[", ".join([*filter(None, same.setting), "measured here"])] = same.top1
    return known


def check_drawable(networks: Sequence[Network], results: Results) -> None:
    """Say at once, and not after a long measurement, why there would be no plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install matplotlib")
    if not any(accuracies(network, results) for network in networks):
        raise ValueError("nothing to draw: no accuracy of these networks is known, in the paper's tables or in results")


def draw(rows: Sequence[BenchRow], results: Results, setting: str, file: Path) -> None:
    """Draw one line of three plots for each setting that accuracies are known at.

    Args:
        rows: What `gsanet bench` measured.
        results: Accuracies measured here.
        setting: What the times were measured at, in words.
        file: Where to; its ending says the format.
    """
    check_drawable([plain_network(row.model, row.model_kwargs) for row in rows], results)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_setting: dict[str, list[tuple[BenchRow, float]]] = defaultdict(list)
    for row in rows:
        for where, top1 in accuracies(plain_network(row.model, row.model_kwargs), results).items():
            by_setting[where].append((row, top1))
    figure = Figure(figsize=(13, 4.2 * len(by_setting)), layout="constrained")
    FigureCanvasAgg(figure)
    plots: Any = figure.subplots(len(by_setting), 3, sharey="row", squeeze=False)
    plots_with_names: list[tuple[Any, list[Point]]] = []
    for line, (where, points) in zip(plots, by_setting.items(), strict=True):
        line[0].set_ylabel("Top-1 (%)\n" + where.replace(", ", ",\n"), parse_math=False)
        for plot, (heading, value) in zip(line, _AXES.items(), strict=True):
            named = [(row.name, value(row), top1) for row, top1 in points if value(row) is not None]
            _scatter(plot, named)
            plot.set_xlabel(heading)
            plot.grid(alpha=0.3)
            plots_with_names.append((plot, named))
    figure.suptitle(f"Parameters, FLOPs and time here: {setting}", fontsize="small")
    figure.draw_without_rendering()  # so that the places of all points are known
    for plot, named in plots_with_names:
        _write_names(plot, named)
    figure.savefig(file, dpi=150)


_AXES: dict[str, Any] = {
    "Parameters (M)": lambda row: row.params and row.params / 1e6,
    "FLOPs (G)": lambda row: row.flops and row.flops / 1e9,
    "Time of one image (ms)": lambda row: row.latency_ms,
}


def draw_results(results: Results, folder: Path) -> list[Path]:
    """Draw the accuracy of measured networks against their parameters, operations and training throughput.

    One picture for each setting (data set, training, length) with at least two networks: those that have names, and
    which residual groups attend. Parts of the module (Table 4) are no networks that one would choose among, and runs
    for some rows only are there for the sake of these.

    Returns:
        The pictures.
    """
    known = set(list_models())
    runs = [
        run
        for run in results.runs
        if not (run.holdout or run.rows) and run.model in known and set(run.network.kwargs) <= {"groups"}
    ]
    settings: dict[Setting, list[list[Run]]] = defaultdict(list)
    for same in alike(runs).values():
        settings[summarise(same).setting].append(same)
    settings = {setting: networks for setting, networks in settings.items() if len(networks) > 1}
    places = {name: place for place, name in enumerate(matrix())}
    found = sorted(  # what the matrix has first is what the tables are made of
        settings.items(),
        key=lambda item: min(places.get(run.run, len(places)) for network in item[1] for run in network),
    )
    if not found:
        raise ValueError("nothing to draw: the folder of results holds no two runs to compare (`gsanet paper run`)")
    files: dict[str, Path] = {}
    lengths: dict[str, str] = {}
    for setting, networks in found:
        dataset, recipe = networks[0][0].dataset, networks[0][0].recipe
        name = f"results-{recipe if recipe.startswith(dataset) else dataset}"
        if lengths.setdefault(name, setting[2]) != setting[2]:
            name += "-" + setting[2].replace(" ", "-").replace(",", "")
        numbered = (name, *(f"{name}-{number}" for number in range(2, len(settings) + 2)))
        name = next(each for each in numbered if each not in files)
        files[name] = folder / f"{name}.png"
        _draw_setting(setting, networks, files[name])
    return list(files.values())


_MEASURED: dict[str, Any] = {
    "Parameters (M)": lambda run: run.params and run.params / 1e6,
    "FLOPs of one image (G)": lambda run: run.flops and run.flops / 1e9,
    "Training, images a second (thousands)": lambda run: run.images_per_second and run.images_per_second / 1e3,
}


def _draw_setting(setting: Setting, networks: list[list[Run]], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    plots: Any = figure.subplots(1, 3, sharey=True)
    means = [statistics.fmean(run.top1 for run in runs) for runs in networks]
    lowest = lowest_shown(means)
    with_names = []
    for plot, (heading, value) in zip(plots, _MEASURED.items(), strict=True):
        named: list[Point] = []
        below: list[Point] = []
        for runs, mean in zip(networks, means, strict=True):
            values = [value(run) for run in runs if value(run)]
            if not values:
                continue
            point = (_name_of(runs[0].network), statistics.fmean(values), mean)
            (named if mean >= lowest else below).append(point)
            if len(runs) > 1 and mean >= lowest:  # from the worst to the best seed
                top1 = [run.top1 for run in runs]
                bars = {"color": colour_of(runs[0].model), "linewidth": 5, "alpha": 0.35, "zorder": 1}
                plot.vlines(point[1], min(top1), max(top1), **bars)
        _scatter(plot, named)
        plot.set_xlabel(heading)
        plot.grid(alpha=0.3)
        with_names.append((plot, named, below))
    dataset, recipe, length = setting
    evaluated = next((run.evaluated_on for runs in networks for run in runs if run.evaluated_on), dataset)
    size = next((run.settings["img_size"] for runs in networks for run in runs if "img_size" in run.settings), None)
    plots[0].set_ylabel("Top-1 (%)")
    families = {"GSA": COLOURS["gsa"], "convolution": COLOURS["conv"], "others": OTHERS}
    drawn = {colour_of(runs[0].model) for runs in networks}
    for label, colour in families.items():
        if colour in drawn:
            line = "none" if colour == OTHERS else "solid"
            plots[0].plot([], [], linestyle=line, marker="o", color=colour, label=label)
    plots[0].legend(loc="lower right", fontsize="small")
    devices = sorted({run.device for runs in networks for run in runs if run.device})
    parts = [f"{dataset}{f' at {size}x{size}' if isinstance(size, int) else ''}", f"recipe {recipe}", length, *devices]
    signs = "; a bar joins the seeds" if any(len(runs) > 1 for runs in networks) else ""
    signs += "; arrows are further down" if any(below for *_, below in with_names) else ""
    title = f"Top-1 of {evaluated}\n{', '.join(part for part in parts if part)}{signs}"
    figure.suptitle(title, fontsize="medium")
    shown = [(plot, [*named, *_mark_below(plot, below)]) for plot, named, below in with_names]
    figure.draw_without_rendering()
    for plot, points in shown:
        _write_names(plot, points)
    figure.savefig(file, dpi=150)


def lowest_shown(accuracies: Sequence[float]) -> float:
    """The accuracy from which on networks are drawn at their place: one far below the others would squeeze them.

    That is more than two and a half times as far below the lower quartile as the quartiles are apart, and at least 2
    points.
    """
    if len(accuracies) < 4:
        return min(accuracies)
    lower, _, upper = statistics.quantiles(accuracies, n=4, method="inclusive")
    return lower - max(2.5 * (upper - lower), 2.0)


def _mark_below(plot: Any, points: list[Point]) -> list[Point]:
    """Networks that are below all that is shown, as arrows on the lower edge; gives these, with accuracies as names."""
    bottom, top = plot.get_ylim()
    edge = bottom + 0.02 * (top - bottom)
    for name, x, _ in points:
        plot.plot([x], [edge], marker="v", color=colour_of(name), scaley=False)
    return [(f"{name}: {y:.1f}", x, edge) for name, x, y in points]


def _name_of(network: Network) -> str:
    """Its name, and which residual groups attend if not all do."""
    groups = network.kwargs.get("groups", ())
    return f"{network.model}, group{'s' * (len(groups) > 1)} {'-'.join(map(str, groups))}" if groups else network.model


def colour_of(name: str) -> str:
    """GSA, convolution, or another."""
    return COLOURS.get(name.split("_")[0], OTHERS)


def _scatter(plot: Any, points: list[Point]) -> None:
    """Points, the depths of one family joined, as in the paper; networks of which a part attends stand alone."""
    for family, group in groupby(sorted(points), key=lambda point: re.sub(r"\d+$", "", point[0])):
        _, x, y = zip(*sorted(group, key=lambda point: point[1]), strict=True)
        plot.plot(x, y, marker="o", color=colour_of(family), **({"markerfacecolor": "white"} if "," in family else {}))
    plot.margins(x=0.25, y=0.15)


def _write_names(plot: Any, points: list[Point]) -> None:
    """The points' names, each at the first place near its point where it covers no other name and no point.

    Where that is not beside the point a line leads to it.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    halo = [withStroke(linewidth=3, foreground="white", alpha=0.8)]  # they cross lines
    centres = plot.transData.transform([place for _, *place in points])
    taken: list[Any] = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    for name, *place in sorted(points):
        for down, align in product((5, -11, 18, -23, 30, -35, 42, -47, 54, -59, 66, -71), ("left", "right")):
            far = down not in (5, -11)
            away = 12 if far else 6
            text = plot.annotate(
                name,
                place,
                xytext=(away if align == "left" else -away, down),
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkB": 3} if far else None,
                textcoords="offset points",
                fontsize="x-small",
                horizontalalignment=align,
                path_effects=halo,
            )
            text.update_positions(plot.figure.canvas.get_renderer())
            box = Text.get_window_extent(text).padded(1.5)  # without the line
            inside = plot.bbox.x0 < box.x0 and box.x1 < plot.bbox.x1 and plot.bbox.y0 < box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            continue
        taken.append(box)
