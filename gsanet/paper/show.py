"""The paper's tables for the terminal: what the paper prints on the first line of a row, what is known here below."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table

from gsanet.bench import BenchRow, BenchSetting
from gsanet.layers.attention import Combination
from gsanet.paper.best import Pair, paper_best
from gsanet.paper.choices import Choice, training_loss
from gsanet.paper.compare import Compared, Difference, Setting
from gsanet.paper.decay import SUFFIX, Decayed
from gsanet.paper.matrix import matrix
from gsanet.paper.open_questions import Answer
from gsanet.paper.printed import CHECK, PrintedTable
from gsanet.paper.table1 import MARKS, Table1Row
from gsanet.paper.tables import Measured, TableRow

NOT_YET = "\u2013"
DIFFERS = "≠"


def show_table(printed: PrintedTable, rows: Sequence[TableRow]) -> Iterator[RenderableType]:
    """Table 2, 3, 4, 5 or 6, and the lines below it."""
    numbers = {"top1": "Top-1", "top5": "Top-5", "cifar100_top1": "CIFAR-100", "params": "Params", "flops": "FLOPs"}
    if "cifar100_top1" not in printed.columns:
        del numbers["cifar100_top1"]
    if "runtime" in printed.columns or any(row.runtimes for row in rows):
        numbers["runtime"] = "Runtime"
    title = f"Table {printed.number}. {printed.caption.split('. ')[0]}"
    table = _table(title, "The paper\n[dim]  here[/]", numbers.values())
    for row in rows:
        table.add_row(f"[bold]{row.name}[/]", *(row.printed.get(column, "") for column in numbers))
        for line in _lines_here(row, list(numbers)):
            table.add_row(*line)
    yield table
    yield from _lines_below(rows, "runtime" in numbers)


def _table(title: str, names: str, numbers: Iterable[str]) -> Table:
    """An empty table: a column of names that may fold, and columns of numbers that may not."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), title=title, title_justify="left")
    table.add_column(names, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


SHORT = {
    Combination.INSERTED.value: "inserted",
    Combination.AT_THE_END.value: "at the end",
    Combination.IN_PARALLEL.value: "in parallel",
    Combination.REPLACES.value: "replaces",
}


def show_table1(printed: PrintedTable, rows: Sequence[Table1Row]) -> Iterator[RenderableType]:
    """Table 1, and the lines below it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), title_justify="left")
    table.title = f"Table 1. {printed.caption}"
    table.add_column("The paper\n[dim]  here[/]", overflow="fold")
    for heading in ("Global", "Content", "Positional"):
        table.add_column(heading, justify="center", no_wrap=True)
    table.add_column("Convolutions", no_wrap=True)
    table.add_column("Commutes\nwith", no_wrap=True)
    for row in rows:
        table.add_row(f"[bold]{row.name}[/]", *(_mark(row.printed[mark]) for mark in MARKS), "")
        if row.measured is None:
            table.add_row(f"  [dim]{row.network} (not here yet)[/]", *[NOT_YET] * 5)
            continue
        cells = [
            f"[yellow]{DIFFERS} {_mark(row.measured[mark]) or 'no'}[/]"
            if mark in row.differences
            else _mark(row.measured[mark])
            for mark in MARKS
        ]
        table.add_row(f"  [dim]{row.network}[/]", *cells, ", ".join(row.commutes_with))
    yield table
    yield (
        "Global: every pixel has a gradient to every pixel. Content: how much a pixel gives to another "
        "depends on what it holds. "
        "Positional: the order of the pixels that one draws on matters. Convolutions: attention modules are inserted "
        "between residual blocks, added at the end, in parallel with convolutions, or in their place. Commutes with: "
        "shuffling the pixels of the input just shuffles the output; so do whole rows and columns (lines); so does "
        "moving an object on an empty map (moves)."
    )
    measured = [row for row in rows if row.measured is not None]
    same = sum(not row.differences for row in measured)
    yield f"{same} of {len(measured)} measured rows have the paper's marks ({DIFFERS}: another)."
    for row in measured:
        for mark, why in row.differences.items():
            yield f"{DIFFERS} {row.network}, {mark}: {why}"
        if row.remark:
            yield f"{row.network}: {row.remark}"
    moved = {row.network: row.shift_error for row in measured if row.shift_error and not row.commutes_with}
    errors = ", ".join(f"{network} {100 * error:.2g} %" for network, error in moved.items())
    if moved:
        yield f"How far moving an object by one pixel is from moving its output: {errors}."
    if len(measured) < len(rows):
        yield f"{NOT_YET} no such network here yet."


def _mark(value: bool | str) -> str:
    return SHORT[value] if isinstance(value, str) else CHECK if value else ""


def _lines_here(row: TableRow, columns: list[str]) -> Iterator[list[str]]:
    """The counts, then a line for each set of runs."""
    counted = {
        "params": _counted(row.params, 1e6, "M", row.params_match),
        "flops": _counted(row.flops, 1e9, "G", row.flops_match),
        "runtime": f"{row.runtimes[0].milliseconds:.1f} ms" if row.runtimes else NOT_YET,
    }
    if not row.exists:
        yield [f"  [dim]{row.network} (not here yet)[/]", *([NOT_YET] * len(columns))]
    else:
        unmeasured = dict.fromkeys(("top1", "top5", "cifar100_top1"), "" if row.measured else NOT_YET)
        yield [f"  [dim]{row.network}[/]", *({**unmeasured, **counted}[column] for column in columns)]
    names = [_setting_name(measured) for measured in row.measured]
    for measured, name in zip(row.measured, names, strict=True):
        cells = _accuracies(measured)
        if names.count(name) > 1:  # only then does it take all the words to tell them apart
            name = ", ".join(filter(None, (measured.training, measured.length)))
        yield [f"  [dim]{name}, {_seeds(measured)}[/]", *(cells.get(column, "") for column in columns)]


def _accuracies(measured: Measured) -> dict[str, str]:
    top1 = f"{measured.top1:.2f}"
    if measured.column == "cifar100_top1":
        return {"cifar100_top1": top1}
    return {"top1": top1, "top5": NOT_YET if measured.top5 is None else f"{measured.top5:.2f}"}


def _setting_name(measured: Measured) -> str:
    """The recipe without what was set over it, where that names the data set, or the data set."""
    return measured.recipe if measured.recipe.startswith(measured.dataset) else measured.dataset


def _seeds(measured: Measured) -> str:
    runs = f"{measured.runs} runs" if measured.runs > 1 else "1 run"
    return runs if measured.top1_spread is None else f"{runs}, ±{measured.top1_spread:.2f}"


def _counted(value: int | None, unit: float, letter: str, match: bool | None) -> str:
    if value is None:
        return NOT_YET
    mark = f"[yellow]{DIFFERS}[/] " if match is False else ""
    return f"{mark}{value / unit:.3f} {letter}"


def _lines_below(rows: Sequence[TableRow], has_runtime: bool) -> Iterator[str]:
    yield "[bold]The paper[/]: ImageNet; runtime of one image on a TPU v3; - where it prints none."
    yield "[bold]Here[/]: parameters and FLOPs counted at 224x224 with 1000 classes."
    if any(not row.measured or (has_runtime and not row.runtimes) for row in rows):
        yield f"{NOT_YET} not measured here yet (no such run in the folder of results)."
    judged = [row for row in rows if row.params_match is not None or row.flops_match is not None]
    agree = [row for row in judged if False not in (row.params_match, row.flops_match)]
    if judged:
        yield f"{len(agree)} of {len(judged)} printed sizes are counted here to the last digit ({DIFFERS}: not)."
    for note in dict.fromkeys(row.note for row in rows if row.note):
        names = ", ".join(row.network for row in rows if row.note == note)
        yield f"{DIFFERS} {names}: {note}"
    others: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        for found in row.measured:  # a run may stand for a row although its network is another
            others[found.setting] += [found.network] if found.network != row.network else []
    for (dataset, recipe, length), networks in sorted(others.items()):
        names = f" with {'; '.join(dict.fromkeys(networks))}" if networks else ""
        yield f"Measured on {dataset}{names}, recipe {recipe}{length and ', '}{length}."
    if any(found.top1_spread is not None for row in rows for found in row.measured):
        yield "± is the standard deviation over seeds."
    for where in sorted({found.where for row in rows for found in row.runtimes[:1]}):
        yield f"Runtime here: one image, {where}."


def show_comparisons(compared: Mapping[Setting, Compared]) -> Iterator[RenderableType]:
    """How the rows differ, in the paper and here, and whether the paper's order holds."""
    lengths = Counter(setting[:2] for setting in compared)
    for (dataset, recipe, length), found in compared.items():
        title = f"Differences in top-1, {recipe if recipe.startswith(dataset) else dataset}"
        if lengths[dataset, recipe] > 1:
            title += f", {length}"
        baselines = {each.against for each in found.differences}
        if len(baselines) == 1:
            title += f", from {min(baselines)}"
        listed = _table(title, "", ("The paper", "Here"))
        listed.add_column("", no_wrap=True)
        for each in found.differences:
            here = f"{each.here:+.2f}" + ("" if each.noise is None else f" ±{each.noise:.2f}")
            name = each.row if len(baselines) == 1 else f"{each.row} [dim]from {each.against}[/]"
            listed.add_row(name, f"{each.paper:+.1f}", here, _verdict(each))
        if found.differences:
            yield listed
        if any(each.noise is not None for each in found.differences):
            yield "± is the standard error, from the spread over seeds of all networks with several."
        if found.pairs:
            same = [pair for pair in found.pairs if pair.agrees]
            yield f"The paper's order holds for {len(same)} of {len(found.pairs)} pairs of measured rows."
            for pair in found.pairs:
                if not pair.agrees:
                    within = ", within the spread of the seeds" if pair.is_within_noise else ""
                    yield (
                        f"{DIFFERS} {pair.row} against {pair.against}: the paper {pair.paper:+.1f}, "
                        f"here {pair.here:+.2f}{within}."
                    )


def show_answers(rows: Sequence[Answer]) -> Iterator[RenderableType]:
    """The open questions, and the lines below them."""
    table = _table("Not in the paper: the GSA module with one thing changed", "", ("Top-1", "Difference", "Runs"))
    for row in rows:
        found = row.measured
        table.add_row(
            f"{row.what}\n  [dim]{row.run}{f', against {row.against}' * (row.against not in ('', rows[0].run))}[/]",
            NOT_YET if found is None else f"{found.top1:.2f}",
            ("" if row.run == rows[0].run else NOT_YET) if row.difference is None else f"{row.difference:+.2f}",
            NOT_YET if found is None else str(found.runs),
        )
    yield table
    if any(row.measured is None for row in rows):
        yield f"{NOT_YET} not measured here yet: `gsanet paper run NAME`."
    for dataset, recipe, length in sorted({row.measured.setting for row in rows if row.measured}):
        yield f"Measured on {dataset}, recipe {recipe}{length and ', '}{length}."


def show_choices(rows: Sequence[Choice]) -> Iterator[RenderableType]:
    """The recipes that were tried, and the lines below them."""
    columns = ("Images", "Epochs", "Conv.", "GSA", "Ahead", "Mean", "Loss")
    table = _table("Top-1 of ResNet-38 on held-out training images, by recipe", "", columns)
    best = max((row.mean for row in rows if row.mean is not None), default=None)
    for row in rows:
        missing = "" if row.alone else NOT_YET
        mean = missing if row.mean is None else f"{row.mean:.2f}"
        losses = [NOT_YET if run is None else _figure(training_loss(run), 1, 2) for run in (row.conv, row.gsa)]
        table.add_row(
            f"choice-*-{row.name}\n  [dim]{row.network if row.alone else row.training}[/]",
            f"{row.images:,}",
            str(row.epochs),
            missing if row.conv is None else f"{row.conv.top1:.2f}",
            NOT_YET if row.gsa is None else f"{row.gsa.top1:.2f}",
            missing if row.difference is None else f"{row.difference:+.2f}",
            f"[bold]{mean}[/]" if row.mean is not None and row.mean == best else mean,
            losses[1] if row.alone else ", ".join(losses),
        )
    yield table
    if any(row.gsa is None or (row.conv is None and not row.alone) for row in rows):
        yield f"{NOT_YET} not measured here yet: `gsanet paper run 'choice-*'`."
    yield "Conv.: with convolutions. Ahead: points that GSA is. Loss: of training, with convolutions, then GSA's."
    yield "A recipe is taken for the higher mean of both networks."


def show_decayed(rows: Sequence[Decayed]) -> Iterator[RenderableType]:
    """What weight decay does, and the lines below it."""
    columns = ("Top-1", "Loss", "Top-1, recipe's", "Loss, recipe's", "Gained")
    table = _table("Tiny-ImageNet with the weight decay of the tables, and with the recipe's", "", columns)
    for row in rows:
        figures = []
        for run in (row.chosen, row.light):
            figures += [NOT_YET] * 2 if run is None else [f"{run.top1:.2f}", _figure(training_loss(run), 1, 2)]
        gained = NOT_YET if row.gained is None else f"{row.gained:+.2f}"
        table.add_row(f"{row.network}\n  [dim]{row.name}[/]", *figures, gained)
    yield table
    if any(row.gained is None for row in rows):
        yield f"{NOT_YET} not measured here yet: `gsanet paper run NAME`."
    chosen, light = (matrix()[name].recipe.weight_decay for name in (rows[0].name, rows[0].name + SUFFIX))
    yield f"Weight decay {chosen:g} in the tables, {light:g} in the recipe. Loss: of training, over the last epochs."


def show_pairs(rows: Sequence[Pair]) -> Iterator[RenderableType]:
    """The best networks on CIFAR-100, and the lines below them."""
    title = "Past the paper: CIFAR-100, GSA against a ResNet of the same depth under the same recipe"
    table = _table(title, "", ("Top-1", "Top-5", "Runs"))
    for row in rows:
        table.add_row(f"[bold]{row.how}[/]")
        for name, found in zip(row.names, (row.gsa, row.conv), strict=True):
            cells = [NOT_YET] * 3
            if found is not None:
                cells = [f"{found.top1:.2f}", NOT_YET if found.top5 is None else f"{found.top5:.2f}", str(found.runs)]
            table.add_row(f"  {matrix()[name].network}\n    [dim]{name}[/]", *cells)
        if row.difference is not None:
            table.add_row("  [dim]difference[/]", f"{row.difference:+.2f}")
    yield table
    if any(found is None for row in rows for found in (row.gsa, row.conv)):
        yield f"{NOT_YET} not measured here yet: `gsanet paper run NAME`."
    yield "The paper's {}, from ImageNet weights at 224x224: {:.1f}.".format(*paper_best())
    for found in (found for row in rows for found in (row.gsa, row.conv) if found):
        yield f"{found.network}: recipe {found.training}{found.length and ', '}{found.length}."


def _verdict(difference: Difference) -> str:
    if difference.is_within_noise:
        return "[dim]within the spread[/]"
    return "[green]same sign[/]" if difference.agrees else f"[yellow]{DIFFERS} other sign[/]"


def show_bench(rows: Sequence[BenchRow], setting: BenchSetting, facts: dict[str, str]) -> Iterator[RenderableType]:
    """What `gsanet bench` measured, and the lines below it."""
    size = "x".join(map(str, setting.img_size))
    title = f"{size}, batch {setting.batch}, {setting.dtype}, {facts['device']}"
    units = {"Params": "M", "FLOPs": "G", "Training": "img/s", "Inference": "img/s", "One image": "ms", "Memory": "MiB"}
    table = _table(title, "Network", (f"{heading}\n({unit})" for heading, unit in units.items()))
    for row in rows:
        table.add_row(
            row.name,
            _figure(row.params, 1e6, 2),
            _figure(row.flops, 1e9, 2),
            _figure(row.train_images_per_second, 1, 1),
            _figure(row.inference_images_per_second, 1, 1),
            _figure(row.latency_ms, 1, 1 if (row.latency_ms or 0) >= 10 else 2),
            _figure(row.train_memory, 2**20, 0),
        )
    yield table
    yield "FLOPs: of one image, a multiplication and an addition are two. One image: latency, inference at batch 1."
    kept = "the most that a training step held" if setting.device == "cuda" else "kept by forward for backward"
    yield f"Memory: {kept}, at batch {setting.batch}. The networks took turns; medians."
    for row in rows:
        for what, error in row.errors.items():
            yield f"[red]{row.name}, {what}[/]: {error}"


def _figure(value: float | None, unit: float, digits: int) -> str:
    return NOT_YET if value is None else f"{value / unit:,.{digits}f}"
