"""The command `gsanet`: parse, call, print."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

import gsanet

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Global self-attention networks for image recognition.",
)
paper = typer.Typer(no_args_is_help=True, help="The paper's tables, counted and measured again.")
app.add_typer(paper, name="paper")
console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Options of the command itself."""
    if version:
        print(gsanet.__version__)
        raise typer.Exit


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="Names to show, such as 'gsa_*'.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the networks, with parameters and operations of one image."""
    names = gsanet.list_models(pattern)
    if not names:
        raise ValueError(f"no network matches {pattern!r}: `gsanet models` lists them all")
    rows: list[dict[str, Any]] = []
    for name in track(names, description="Counting", console=errors, transient=True):
        model: Any = gsanet.create_model(name)
        height, width = model.pretrained_cfg["input_size"][1:]
        params, flops = gsanet.count_parameters(model), gsanet.count_flops(model)
        rows.append({"model": name, "input": f"{height}x{width}", "params": params, "flops": flops})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("Model", "Input", title="Networks", title_justify="left")
    for heading in ("Params (M)", "FLOPs (G)"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["model"], row["input"], f"{row['params'] / 1e6:.2f}", f"{row['flops'] / 1e9:.2f}")
    console.print(table)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="A name from `gsanet models`.")],
    img_size: Annotated[str, typer.Option(help="Image size, as 224 or 160x96 (height x width).")] = "",
    num_classes: Annotated[int | None, typer.Option(help="Number of classes.", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Show a network's parameters, operations and feature maps, stage by stage."""
    from gsanet.models.cost import stage_costs

    size = _parse_size(img_size)
    options: dict[str, Any] = {"num_classes": num_classes, "img_size": size}
    network = gsanet.create_model(model, **{name: value for name, value in options.items() if value is not None})
    if not hasattr(network, "stages") or not hasattr(network, "stem"):
        raise ValueError(f"{model} is not a network of this package: `gsanet models` lists them")
    stages = stage_costs(network, size)
    total = {"params": sum(s.params for s in stages), "flops": sum(s.flops for s in stages)}
    if as_json:
        print(json.dumps({"model": model, **total, "stages": [asdict(s) for s in stages]}, indent=2))
        return
    table = Table("Stage", "Operation", title=model, title_justify="left", show_footer=True)
    table.columns[0].footer = "all"
    for heading, footer in {
        "Blocks": "",
        "Channels": "",
        "Map": "",
        "Params (M)": f"{total['params'] / 1e6:.3f}",
        "FLOPs (G)": f"{total['flops'] / 1e9:.3f}",
    }.items():
        table.add_column(heading, footer, justify="right")
    for stage in stages:
        channels, *size_out = stage.shape
        table.add_row(
            stage.name,
            stage.operation,
            str(stage.blocks),
            str(channels),
            "x".join(map(str, size_out)),
            f"{stage.params / 1e6:.3f}",
            f"{stage.flops / 1e9:.3f}",
        )
    console.print(table)


@app.command()
def bench(
    models: Annotated[list[str] | None, typer.Option(help="Names or patterns. Default: '*_resnet50'.")] = None,
    table: Annotated[int | None, typer.Option(help="The networks of this table of the paper.", min=1, max=6)] = None,
    img_size: Annotated[str, typer.Option(help="Image size, as 224 or 160x96 (height x width).")] = "224",
    batch: Annotated[int | None, typer.Option(help="Batch size. Default: 64 on a GPU, else 2.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16. Default: bfloat16 on a GPU.")] = "",
    seconds: Annotated[float, typer.Option(help="How long each network is timed, for each measurement.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against size, FLOPs and time here (PNG).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything here as JSON, for the folder of results.")] = None,
    results: Annotated[Path, typer.Option(help="The folder of results, for accuracies.")] = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Measure networks side by side: training, inference, latency and memory at one setting."""
    import torch

    from gsanet.bench import BenchSetting, environment
    from gsanet.bench import bench as measure
    from gsanet.paper.figure import accuracies, check_drawable, draw
    from gsanet.paper.printed import Network, printed_table
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_bench

    patterns = models or ([] if table else ["*_resnet50"])
    networks = [Network(name) for pattern in patterns for name in gsanet.list_models(pattern)]
    if table is not None:
        networks += [row.network for row in printed_table(table).rows]
    if not networks:
        raise ValueError(f"no network matches {', '.join(map(repr, patterns))}: `gsanet models` lists them all")
    networks = list(dict.fromkeys(networks))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device == "cuda"
    setting = BenchSetting(
        img_size=_parse_size(img_size) or (224, 224),
        batch=(64 if gpu else 2) if batch is None else batch,
        device=device,
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        seconds=seconds,
    )
    known = read_results(results)
    for file in (out, plot):
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"there is no folder {file.parent} to write {file.name} into")
    if plot is not None:
        check_drawable(networks, known)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        pairs = [(network.model, network.kwargs) for network in networks]
        rows = measure(pairs, setting, lambda what, part: bar.update(task, description=what, completed=part))
    facts, size = environment(device), "x".join(map(str, setting.img_size))
    found = {
        "kind": "bench",
        "setting": {**asdict(setting), "img_size": size},
        "environment": facts,
        "networks": [
            {**asdict(row), "top1": accuracies(network, known)} for network, row in zip(networks, rows, strict=True)
        ],
    }
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")
    if plot is not None:
        draw(rows, known, f"{size}, {setting.dtype}, {facts['device']}", plot)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for part in show_bench(rows, setting, facts):
        console.print(part, highlight=False)
    for file in (out, plot):
        if file is not None:
            console.print(f"written: {file}", soft_wrap=True, highlight=False)


@paper.command()
def structure(as_json: AsJson = False) -> None:
    """Count parameters and operations of the paper's networks, beside what the paper prints."""
    from gsanet.paper.structure import ROWS
    from gsanet.paper.structure import structure as counted

    rows = list(track(counted(), description="Counting", total=len(ROWS), console=errors, transient=True))
    if as_json:
        print(json.dumps([{**asdict(row), "match": row.matches} for row in rows], indent=2))
        return
    table = Table("Network", title="Parameters (M) and FLOPs (G) at 224x224, 1000 classes", title_justify="left")
    for heading in ("Params", "paper", "FLOPs", "paper"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.network}\n[dim]{row.made_by}; Table {row.table}[/]",
            f"{row.params / 1e6:.3f}",
            _mark(row.printed_params_m, row.params_match),
            f"{row.flops / 1e9:.3f}",
            _mark(row.printed_flops_g, row.flops_match),
            "[green]match[/]" if row.matches else "[yellow]no match[/]",
        )
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.network}: {row.note}")
    console.print(f"{sum(row.matches for row in rows)} of {len(rows)} match to the last printed digit.")


@paper.command()
def table1(as_json: AsJson = False) -> None:
    """What each system's attention can do, measured: the marks of Table 1 beside the paper's."""
    from gsanet.paper.printed import printed_table
    from gsanet.paper.show import show_table1
    from gsanet.paper.table1 import networks
    from gsanet.paper.table1 import table1 as measured

    total = len(networks())
    rows = list(track(measured(), description="Measuring", total=total, console=errors, transient=True))
    if as_json:
        print(json.dumps([{**asdict(row), "commutes_with": row.commutes_with} for row in rows], indent=2))
        return
    for part in show_table1(printed_table(1), rows):
        console.print(part, highlight=False)


ResultsFolder = Annotated[Path, typer.Option("--results", help="The folder of measured results.")]


def _paper_table(number: int, summary: str) -> None:
    """Add the command `gsanet paper tableN`."""

    def command(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
        from gsanet.paper.printed import printed_table
        from gsanet.paper.results import read_results
        from gsanet.paper.show import show_table
        from gsanet.paper.tables import table_rows

        printed = printed_table(number)
        counted = table_rows(number, read_results(results))
        total = len(printed.rows)
        rows = list(track(counted, description="Counting", total=total, console=errors, transient=True))
        if as_json:
            print(
                json.dumps(
                    {"table": number, "caption": printed.caption, "rows": [asdict(row) for row in rows]}, indent=2
                )
            )
            return
        for part in show_table(printed, rows):
            console.print(part, highlight=False)

    paper.command(f"table{number}", help=f"{summary}: as printed, counted, and measured here.")(command)


for _number, _summary in {
    2: "GSA against axial attention",
    3: "GSA against existing approaches",
    4: "The components of GSA",
    5: "The residual groups that attend",
    6: "CNN against GSA",
}.items():
    _paper_table(_number, _summary)


def _mark(figure: str, matches: bool) -> str:
    return figure if matches else f"[yellow]{figure}[/]"


def _parse_size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"image size must be like 224 or 160x96, got {text!r}")
    return int(parts[0]), int(parts[-1])


def main() -> None:
    """Run the command; what the user got wrong is one line and exit code 2, without a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        errors.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
