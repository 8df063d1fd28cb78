"""`gsanet models`, `info` and `bench`: what there is, what it costs, how fast it is."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

import gsanet
from gsanet.cli.common import AsJson, DeviceOption, check_writable, console, errors, parse_size, show


def models(
    pattern: Annotated[str, typer.Argument(help="Names to show, such as 'gsa_*'.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the networks, with parameters and operations of one image."""
    names = gsanet.list_models(pattern)
    if not names:
        raise ValueError(f"no network matches {pattern!r}: `gsanet models` lists them all")
    rows: list[dict[str, Any]] = []
    pretrained = gsanet.list_models(pretrained=True)
    for name in track(names, description="Counting", console=errors, transient=True):
        with torch.device("meta"):  # weights are not looked at
            model: Any = gsanet.create_model(name)
        height, width = model.pretrained_cfg["input_size"][1:]
        params, flops = gsanet.count_parameters(model), gsanet.count_flops(model)
        weights = model.pretrained_cfg.get("description") if name in pretrained else None
        size = f"{height}x{width}"
        rows.append({"model": name, "input": size, "params": params, "flops": flops, "weights": weights})
    show(rows, [_models_table(rows, with_weights=bool(pretrained))], as_json)


def _models_table(rows: list[dict[str, Any]], with_weights: bool) -> Table:
    table = Table("Model", "Input", title="Networks", title_justify="left")
    for heading in ("Params (M)", "FLOPs (G)"):
        table.add_column(heading, justify="right")
    if with_weights:
        table.add_column("Weights in the package")
    for row in rows:
        cells = [row["model"], row["input"], f"{row['params'] / 1e6:.2f}", f"{row['flops'] / 1e9:.2f}"]
        table.add_row(*cells, *([row["weights"] or ""] if with_weights else []))
    return table


def info(
    model: Annotated[str, typer.Argument(help="A name from `gsanet models`.")],
    img_size: Annotated[str, typer.Option(help="Image size, as 224 or 160x96 (height x width).")] = "",
    num_classes: Annotated[int | None, typer.Option(help="Number of classes.", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Show a network's parameters, operations and feature maps, stage by stage."""
    from gsanet.models.cost import stage_costs

    size = parse_size(img_size)
    options: dict[str, Any] = {"num_classes": num_classes, "img_size": size}
    network = gsanet.create_model(model, **{name: value for name, value in options.items() if value is not None})
    if not hasattr(network, "stages") or not hasattr(network, "stem"):
        raise ValueError(f"{model} is not a network of this package: `gsanet models` lists them")
    stages = stage_costs(network, size)
    total = {"params": sum(s.params for s in stages), "flops": sum(s.flops for s in stages)}
    content = {"model": model, **total, "stages": [asdict(s) for s in stages]}
    show(content, [_stages_table(model, stages, total)], as_json)


def _stages_table(model: str, stages: Sequence[Any], total: dict[str, int]) -> Table:
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
    return table


def bench(
    models: Annotated[list[str] | None, typer.Option(help="Names or patterns. Default: '*_resnet50'.")] = None,
    table: Annotated[int | None, typer.Option(help="The networks of this table of the paper.", min=1, max=6)] = None,
    img_size: Annotated[str, typer.Option(help="Image size, as 224 or 160x96 (height x width).")] = "224",
    batch: Annotated[int | None, typer.Option(help="Batch size. Default: 64 on a GPU, else 2.")] = None,
    device: DeviceOption = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16. Default: bfloat16 on a GPU.")] = "",
    seconds: Annotated[float, typer.Option(help="How long each network is timed, for each measurement.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against size, FLOPs and time here (PNG).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything here as JSON, for the folder of results.")] = None,
    results: Annotated[Path, typer.Option(help="The folder of results, for accuracies.")] = Path("results"),
    as_json: AsJson = False,
) -> None:
    """Measure networks side by side: training, inference, latency and memory at one setting."""
    from gsanet.bench import BenchSetting, environment
    from gsanet.bench import bench as measure
    from gsanet.devices import default_device
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
    device = device or default_device()
    gpu = device == "cuda"
    setting = BenchSetting(
        img_size=parse_size(img_size) or (224, 224),
        batch=(64 if gpu else 2) if batch is None else batch,
        device=device,
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        seconds=seconds,
    )
    known = read_results(results)
    if out is not None:
        check_writable(out)
    if plot is not None:
        check_writable(plot, picture=True)
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
    show(found, show_bench(rows, setting, facts), as_json, fold=True)
    for file in () if as_json else (out, plot):
        if file is not None:
            console.print(f"written: {file}", soft_wrap=True, highlight=False)
