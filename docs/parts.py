"""The parts of the pages that are made from the package and from `results/`, each time the site is built."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer.cli
from costs import LAYERS, operations
from typer.testing import CliRunner

import gsanet
from gsanet.layers.attention import Attention
from gsanet.paper.printed import NOTHING, Network, printed_table
from gsanet.paper.results import Results, read_results
from gsanet.paper.structure import structure
from gsanet.paper.tables import Measured, TableRow, count, table_rows

UNKNOWN = "\u2013"
FAMILIES = {  # of networks, by the beginning of their names
    "GSA": ("gsa_",),
    "Their convolutional twins": ("conv_",),
    "Rivals that take the place of convolutions": ("axial_", "lr_", "sasa_", "san"),
    "Rivals beside convolutions, between blocks or at the end": ("",),
}


def networks() -> str:
    """All registered networks with their parameters and operations, family by family."""
    rest = gsanet.list_models()
    lines: list[str] = []
    for family, beginnings in FAMILIES.items():
        names = [name for name in rest if name.startswith(beginnings)]
        rest = [name for name in rest if name not in names]
        rows = []
        for name in names:
            counted = count(Network(name))
            assert counted is not None
            kinds, (height, width) = _facts(name)
            attention = ", ".join(f"[`{kind.__name__}`][gsanet.layers.{kind.__name__}]" for kind in kinds)
            rows.append([f"`{name}`", attention or "none", f"{height}x{width}", *_millions(*counted)])
        lines += [f"### {family}", "", *_table(["network", "attention", "images", *COSTS], rows), ""]
    return "\n".join(lines)


COSTS = ("params (M)>", "FLOPs (G)>")


def _facts(name: str) -> tuple[list[type[Attention]], tuple[int, int]]:
    """A network's kinds of attention, and the size of the images that it is made for."""
    with torch.device("meta"):
        model: Any = gsanet.create_model(name)
    kinds = dict.fromkeys(type(module) for module in model.modules() if isinstance(module, Attention))
    public = [kind for kind in kinds if kind.__name__ in gsanet.layers.__all__]
    return public, tuple(model.pretrained_cfg["input_size"][1:])


def _millions(params: int, flops: int) -> tuple[str, str]:
    return f"{params / 1e6:.2f}", f"{flops / 1e9:.2f}"


def sizes() -> str:
    """The paper's networks: counted beside printed."""
    rows = [
        [
            row.network,
            f"`{row.made_by}`",
            f"{row.params / 1e6:.3f}",
            row.printed_params_m if row.params_match else f"**{row.printed_params_m}**",
            f"{row.flops / 1e9:.3f}",
            row.printed_flops_g if row.flops_match else f"**{row.printed_flops_g}**",
        ]
        for row in structure()
    ]
    return "\n".join(_table(["network", "made by", "params (M)>", "paper>", "FLOPs (G)>", "paper>"], rows))


def costs() -> str:
    """What the layers of a module cost on the four maps of a GSA-ResNet at 224x224."""
    rows = []
    for dim, side in {64: 56, 128: 28, 256: 14, 512: 7}.items():
        counted = operations(dim, side)
        rows.append([f"{side}x{side}x{dim}", *(f"{counted[layer] / 1e6:.1f}" for layer in LAYERS)])
    return "\n".join(_table(["map", *(f"{layer}>" for layer in LAYERS)], rows))


def commands() -> str:
    """The commands and their options, from the command-line program itself."""
    # What `typer gsanet.cli utils docs` prints; here, because torch need not be imported again.
    done = CliRunner().invoke(
        typer.cli.app, ["gsanet.cli", "utils", "docs", "--name", "gsanet"], catch_exceptions=False
    )
    _, commands = done.stdout.split("\n## ", maxsplit=1)  # before it stands what the page says itself
    return f"## {commands}"


def results() -> str:
    """Tables 2 to 6: what the paper prints, and what the runs in `results/` reached."""
    found = read_results(Path("results"))
    lines: list[str] = []
    for number in range(2, 7):
        printed = printed_table(number)
        headings = ["the paper's row", "network here", "paper, ImageNet>", "here>", "params (M)>", "paper>"]
        rows = [_result(row) for row in table_rows(number, found)]
        lines += [f"## Table {number}", "", f"*{printed.caption}*", "", *_table(headings, rows), ""]
    return "\n".join([*lines, *_runs(found)])


def _result(row: TableRow) -> list[str]:
    measured = "<br>".join(_measured(each) for each in row.measured)
    params = UNKNOWN if row.params is None else f"{row.params / 1e6:.3f}"
    network = f"`{row.network}`" if row.exists else UNKNOWN
    top1, printed = (_printed(row, column) for column in ("top1", "params"))
    return [row.name, network, top1, measured or UNKNOWN, params, printed.removesuffix(" M")]


def _printed(row: TableRow, column: str) -> str:
    text = row.printed.get(column, "")
    return UNKNOWN if text in NOTHING else text


def _measured(runs: Measured) -> str:
    spread = "" if runs.top1_spread is None else f" ± {runs.top1_spread:.2f}"
    return f"{runs.top1:.2f}{spread} ({runs.dataset}, {runs.runs} {'run' if runs.runs == 1 else 'runs'})"


def _runs(found: Results) -> Iterator[str]:
    yield "## The runs"
    yield ""
    if not found.runs:
        yield "There is no finished run in `results/` yet."
        return
    headings = ["run", "network", "data", "recipe", "seed>", "top-1>", "top-5>", "commit"]
    yield from _table(
        headings,
        (
            [
                f"`{run.run}`",
                f"`{run.network}`",
                run.dataset,
                f"`{run.recipe}`",
                str(run.seed),
                f"{run.top1:.2f}",
                UNKNOWN if run.top5 is None else f"{run.top5:.2f}",
                f"`{run.commit}`",
            ]
            for run in found.runs
        ),
    )
    yield ""
    yield "The command of each stands in its file."


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; a heading that ends in > is of numbers, aligned to the right."""
    return [
        _line(heading.removesuffix(">") for heading in headings),
        _line("---:" if heading.endswith(">") else "---" for heading in headings),
        *(_line(cell.replace("|", "\\|") for cell in row) for row in rows),
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


PARTS: dict[str, Callable[[], str]] = {
    "networks": networks,
    "sizes": sizes,
    "costs": costs,
    "commands": commands,
    "results": results,
}
