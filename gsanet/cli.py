"""The command `gsanet`: parse, call, print."""

import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
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
recipes = typer.Typer(help="The recipes for training.")
app.add_typer(recipes, name="recipes")
console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda. Default: the GPU if there is one.")]


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
    pretrained = gsanet.list_models(pretrained=True)
    for name in track(names, description="Counting", console=errors, transient=True):
        model: Any = gsanet.create_model(name)
        height, width = model.pretrained_cfg["input_size"][1:]
        params, flops = gsanet.count_parameters(model), gsanet.count_flops(model)
        weights = model.pretrained_cfg.get("description") if name in pretrained else None
        size = f"{height}x{width}"
        rows.append({"model": name, "input": size, "params": params, "flops": flops, "weights": weights})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("Model", "Input", title="Networks", title_justify="left")
    for heading in ("Params (M)", "FLOPs (G)"):
        table.add_column(heading, justify="right")
    if pretrained:
        table.add_column("Weights in the package")
    for row in rows:
        cells = [row["model"], row["input"], f"{row['params'] / 1e6:.2f}", f"{row['flops'] / 1e9:.2f}"]
        table.add_row(*cells, *([row["weights"] or ""] if pretrained else []))
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
        img_size=_parse_size(img_size) or (224, 224),
        batch=(64 if gpu else 2) if batch is None else batch,
        device=device,
        dtype=dtype or ("bfloat16" if gpu else "float32"),
        seconds=seconds,
    )
    known = read_results(results)
    if out is not None:
        _check_writable(out)
    if plot is not None:
        _check_writable(plot, picture=True)
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
        from gsanet.paper.compare import compare, seed_spreads
        from gsanet.paper.printed import printed_table
        from gsanet.paper.results import read_results
        from gsanet.paper.show import show_comparisons, show_table
        from gsanet.paper.tables import table_rows

        printed = printed_table(number)
        known = read_results(results)
        counted = table_rows(number, known)
        total = len(printed.rows)
        rows = list(track(counted, description="Counting", total=total, console=errors, transient=True))
        compared = compare(number, rows, seed_spreads(known))
        if as_json:
            differences = [
                {"setting": setting, **asdict(found), "order_holds": [pair.agrees for pair in found.pairs]}
                for setting, found in compared.items()
            ]
            content = {"table": number, "caption": printed.caption, "rows": [asdict(row) for row in rows]}
            print(json.dumps({**content, "compared": differences}, indent=2))
            return
        for part in (*show_table(printed, rows), *show_comparisons(compared)):
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


@paper.command()
def figures(
    results: ResultsFolder = Path("results"),
    out: Annotated[Path, typer.Option(help="The folder of the pictures.")] = Path("docs"),
) -> None:
    """Draw measured accuracy against parameters, FLOPs and throughput, a picture for each data set."""
    from gsanet.paper.figure import draw_results
    from gsanet.paper.results import read_results

    if not out.is_dir():
        raise ValueError(f"there is no folder {out} to draw into")
    for file in draw_results(read_results(results), out):
        console.print(f"written: {file}", soft_wrap=True, highlight=False)


@paper.command("studies")
def show_paper_studies(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """What was tried that the paper leaves open: the GSA module with one thing changed, against the module itself."""
    from gsanet.paper.open_questions import answers
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_answers

    rows = answers(read_results(results))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for part in show_answers(rows):
        console.print(part, highlight=False)


@paper.command("choices")
def show_paper_choices(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """What the recipe of the tables was chosen by: two networks on training images that were held out."""
    from gsanet.paper.choices import choices
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_choices

    rows = choices(read_results(results))
    if as_json:
        print(json.dumps([{**asdict(row), "mean": row.mean, "difference": row.difference} for row in rows], indent=2))
        return
    for part in show_choices(rows):
        console.print(part, highlight=False)


@paper.command("best")
def show_paper_best(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """The best networks on CIFAR-100, whatever the recipe: GSA against a ResNet of its depth, and the paper's."""
    from gsanet.paper.best import pairs
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_pairs

    rows = pairs(read_results(results))
    if as_json:
        print(json.dumps([{**asdict(row), "difference": row.difference} for row in rows], indent=2))
        return
    for part in show_pairs(rows):
        console.print(part, highlight=False)


@paper.command("run")
def run_paper(
    names: Annotated[list[str] | None, typer.Argument(help="Names or patterns, such as 'cifar100-*'.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs of the matrix.")] = False,
    table: Annotated[int | None, typer.Option(help="The runs of a table of the paper.", min=2, max=6)] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show what is left, and run nothing.")] = False,
    data: Annotated[list[str] | None, typer.Option(help="DATASET=PATH. Default: data/DATASET.")] = None,
    work: Annotated[Path, typer.Option(help="The folder of run directories.")] = Path("runs/paper"),
    results: ResultsFolder = Path("results"),
    stop_after: Annotated[float | None, typer.Option(help="Save and stop after so many seconds.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Begin only what can be finished by then.")] = False,
    processes: Annotated[int, typer.Option(help="So many runs at a time: one compiles while others train.")] = 1,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Use CUDA graphs.")] = False,
    commit: Annotated[str, typer.Option(help="The commit that runs. Default: the checkout's.")] = "",
) -> None:
    """Make the experiments that stand for the paper's; those with results are not made again, cut ones go on."""
    from gsanet.paper.run_matrix import run_command

    code = run_command(
        names or [],
        everything=everything,
        table=table,
        list_only=list_only,
        data=data or [],
        work=work,
        results=results,
        stop_after=stop_after,
        whole=whole,
        processes=processes,
        compile=compile,
        graphs=graphs,
        commit=commit,
        say=lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False),
    )
    if code:
        raise typer.Exit(code)


@paper.command("record")
def record_paper_run(
    run: Annotated[Path, typer.Option(help="A finished run directory of `gsanet train`.")],
    name: Annotated[str, typer.Option(help="What to call it.")],
    recipe: Annotated[str, typer.Option(help="The recipe that it was started with.")],
    dataset: Annotated[str, typer.Option(help="What it was trained on. Default: its data's last part.")] = "",
    notes: Annotated[str, typer.Option(help="For the reader.")] = "",
    commit: Annotated[str, typer.Option(help="The commit that made it. Default: what the run noted.")] = "",
    results: ResultsFolder = Path("results"),
) -> None:
    """Write the results of a run that is not in the matrix, as results/runs/NAME.json."""
    from gsanet.paper.record import record_run

    if not name or Path(name).name != name:
        raise ValueError(f"--name is the name of a file in {results / 'runs'}, without folders, got {name!r}")
    file = results / "runs" / f"{name}.json"
    found = record_run(run, file, recipe_name=recipe, commit=commit, dataset=dataset, notes=notes)
    console.print(f"written: {file}: top-1 {found.top1:.2f} % of {found.evaluated_on}", highlight=False, soft_wrap=True)


Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value over the recipe's, such as lr=0.05 or data.padding=2.")
]


@app.command()
def train(
    recipe: Annotated[str, typer.Option(help="A name from `gsanet recipes`, or a YAML file.")] = "",
    model: Annotated[str, typer.Option(help="A name from `gsanet models`. Default: the recipe's.")] = "",
    data: Annotated[
        str, typer.Option(help="A folder with train/ and val/, or one of the kinds in docs/training.md.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="A new directory for the run.")] = None,
    weights: Annotated[str, typer.Option(help="Weights to start from: a safetensors file or a run directory.")] = "",
    settings: Settings = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
) -> None:
    """Train a network, or go on where a run stopped."""
    from accelerate import PartialState

    from gsanet.train.engine import train as run
    from gsanet.train.recipe import load_recipe
    from gsanet.train.run_directory import read_run

    if resume is not None:
        if recipe or model or data or out or weights or settings:
            raise ValueError("--resume goes on with a run as it was started: give no other option with it")
        result = run(read_run(resume), resume, resume=True)
    else:
        if not recipe or out is None:
            raise ValueError("give --recipe NAME and --out DIR to start a run, or --resume DIR to go on with one")
        overrides = _overrides(settings, {"model": model, "weights": weights, "data.path": data})
        result = run(load_recipe(recipe, overrides), out)
    PartialState().destroy_process_group()
    if result.stopped_by:
        raise typer.Exit(128 + result.stopped_by)


@app.command("eval")
def evaluate(
    run: Annotated[Path | None, typer.Option(help="A run directory.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Which weights of the run: best or last.")] = "best",
    model: Annotated[str, typer.Option(help="Without --run: the network.")] = "",
    weights: Annotated[
        Path | None, typer.Option(help="Without --run: its weights. Default: those in the package.")
    ] = None,
    data: Annotated[str, typer.Option(help="The data set. Default: the run's.")] = "",
    recipe: Annotated[
        str, typer.Option(help="Without --run: whose image size and options. Default: the network's.")
    ] = "",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate weights: top-1, top-5, loss, images a second; also written beside your weights, as JSON."""
    from accelerate import PartialState

    from gsanet.models.described import shipped_weights
    from gsanet.train.checkpoint import explained, replace_file
    from gsanet.train.evaluate import overflow_words
    from gsanet.train.evaluate_weights import evaluate_weights, weights_recipe
    from gsanet.train.recipe import load_recipe
    from gsanet.train.run_directory import read_run

    overrides = _overrides(settings, {"model": model, "data.path": data})
    file: Path | None = None
    if run is not None and weights is None:
        chosen, source, file = read_run(run, overrides), run / checkpoint, run / f"eval-{checkpoint}.json"
    elif run is None and (weights is not None or model or recipe):
        if weights is None:
            source = shipped_weights(model or load_recipe(recipe).model)
        else:
            source, file = weights, weights.with_suffix(".eval.json")
        chosen = load_recipe(recipe, overrides) if recipe else weights_recipe(source, model, overrides)
    else:
        raise ValueError(
            "give either --run DIR, or --data PATH with --model NAME (its weights in the package) or --weights FILE"
        )
    found = evaluate_weights(chosen, source, _say)
    if PartialState().is_main_process:
        figures: dict[str, Any] = {"model": chosen.model, "data": chosen.data_path, "weights": str(source)}
        figures |= {"holdout": chosen.data_settings.holdout, **asdict(found)}
        if not math.isfinite(found.loss):  # JSON has no word for that
            figures["loss"] = None
        if as_json:
            print(json.dumps(figures, indent=2), flush=True)
        else:
            table = Table("Model", "Top-1 (%)", "Top-5 (%)", "Loss", "Images", "Images/s")
            accuracies = [f"{found.top1:.2f}", f"{found.top5:.2f}", f"{found.loss:.4f}"]
            table.add_row(chosen.model, *accuracies, f"{found.images:,}", f"{found.images_per_second:,.0f}")
            console.print(table)
            if found.overflowed:
                console.print(f"{overflow_words(found.overflowed)}: counted as wrong, and not in the loss")
        if file is not None:  # last: what was measured is not lost where it cannot be written
            with explained(file):
                replace_file(file, (json.dumps(figures, indent=2) + "\n").encode())
            if not as_json:
                console.print(f"Also in {file}", soft_wrap=True)
    PartialState().destroy_process_group()


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The file to write: .onnx, or .pt2 for exported.")],
    model: Annotated[
        str,
        typer.Argument(help="From `gsanet models`; or local-dir:FOLDER, hf-hub:USER/NAME.", show_default=False),
    ] = "",
    weights: Annotated[Path | None, typer.Option(help="Weights of the network: a safetensors file.")] = None,
    run: Annotated[Path | None, typer.Option(help="A run directory, in the place of MODEL and --weights.")] = None,
    format: Annotated[str, typer.Option(help="onnx, or exported: an archive for torch.export.load.")] = "onnx",
    img_size: Annotated[
        str, typer.Option(help="Image size, as 224 or 160x96. Default: what the network was made for.")
    ] = "",
    opset: Annotated[int, typer.Option(help="Of ONNX, 18 or later.")] = 18,
    fuse: Annotated[bool, typer.Option(help="Fold batch norms into what they follow.")] = True,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option of a named network, such as groups=[2,3,4].")
    ] = None,
) -> None:
    """Write a network to a file that runs without this package, and check it against PyTorch on photographs."""
    from gsanet.export import check_request, export_model, open_network
    from gsanet.train.recipe import parse_overrides

    size = _parse_size(img_size)
    kind = check_request(out, format, opset)
    source = open_network(model, weights, run, size, parse_overrides(settings or []))
    _say(source.weights)
    found = export_model(
        source.model, out, kind, img_size=size, opset=opset, fuse=fuse, class_names=source.class_names, report=_say
    )
    for line in (
        f"written: {found.file} ({found.size / 1e6:.1f} MB)",
        f"input:   {found.inputs}",
        f"output:  {found.outputs}",
        f"largest difference from PyTorch: {found.difference:.1e} of the largest logit",
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


@app.command("publish")
def publish_run(
    run: Annotated[Path, typer.Option(help="A run directory: its best weights are published.")],
    repo: Annotated[str, typer.Option(help="USER/NAME on the Hugging Face Hub; made if need be.")],
    folder: Annotated[Path | None, typer.Option(help="Write the files here and upload nothing.")] = None,
    license: Annotated[str, typer.Option(help="Of the weights, as the Hub spells it.")] = "apache-2.0",
) -> None:
    """Publish the network of a run on the Hugging Face Hub: weights, options, classes, preprocessing, a model card."""
    from gsanet.hub import publish

    where = publish(run, repo, folder, license, _say)
    console.print(f"published: {where}" if folder is None else f"written: {where}", highlight=False, soft_wrap=True)
    source = repo if folder is None else folder
    console.print(f'to use it: gsanet.from_pretrained("{source}")', highlight=False, soft_wrap=True, markup=False)


@app.command("pack")
def pack_run(
    run: Annotated[Path, typer.Option(help="A run directory.")],
    out: Annotated[Path, typer.Option(help="The file to write: .safetensors.")],
    checkpoint: Annotated[str, typer.Option(help="Which weights of the run: last or best.")] = "last",
    data: Annotated[
        str, typer.Option(help="Evaluate what was written on this data set. Default: the run's figures.")
    ] = "",
    license: Annotated[str, typer.Option(help="Of the weights, as the Hub spells it.")] = "apache-2.0",
    note: Annotated[str, typer.Option(help="What the licence does not say, such as the terms of the data.")] = "",
) -> None:
    """Turn a run into one file that holds all: bf16 weights, network, classes, preprocessing, recipe, metrics."""
    from gsanet.pack import pack

    found = pack(run, out, checkpoint=checkpoint, data=data, license=license, note=note, report=_say)
    console.print(f"written: {out} ({out.stat().st_size / 1e6:.2f} MB)", highlight=False, soft_wrap=True)
    console.print(f"metrics: {found.summary}", highlight=False, soft_wrap=True)
    console.print(
        f'to use it: gsanet.create_model("{found.model}", pretrained="{out}")',
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


@recipes.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """List the recipes that come with the package."""
    from gsanet.train.recipe import load_recipe, recipe_names, recipe_text

    if context.invoked_subcommand:
        return
    table = Table("Recipe", "What for", "Length")
    for name in recipe_names():
        found = load_recipe(name)
        what = recipe_text(name).splitlines()[0].lstrip("# ")
        table.add_row(name, what, f"{found.epochs} epochs" if found.epochs else f"{found.steps:,} steps")
    console.print(table)
    console.print("`gsanet recipes show NAME` prints one with its comments.")


@recipes.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="A name from `gsanet recipes`.")]) -> None:
    """Print a recipe with its comments."""
    from gsanet.train.recipe import recipe_text

    print(recipe_text(name), end="")


@app.command()
def preview(
    recipe: Annotated[str, typer.Option(help="A name from `gsanet recipes`, or a YAML file.")],
    data: Annotated[str, typer.Option(help="The data set, as for `gsanet train`. Default: the recipe's.")] = "",
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("preview.png"),
    images: Annotated[int, typer.Option(help="Rows: training images.")] = 8,
    epochs: Annotated[int, typer.Option(help="Columns, after the one that evaluation would see.")] = 8,
    settings: Settings = None,
) -> None:
    """Draw training images as a recipe shows them to the network, epoch by epoch."""
    from gsanet.train.preview import draw_preview
    from gsanet.train.recipe import load_recipe

    _check_writable(out, picture=True)
    draw_preview(load_recipe(recipe, _overrides(settings, {"data.path": data})), out, images, epochs)
    console.print(f"written: {out}", soft_wrap=True, highlight=False)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where the two runs go.")] = Path("runs/quickstart")) -> None:
    """Train a small GSA network and its convolutional twin on scanned digits; then look at a photograph."""
    from gsanet.train.demo import look_at_photograph, train_pair

    pair = train_pair(out)
    table = Table(
        "Network", "Params (K)", "FLOPs (M)", "Top-1 (%)", "Seconds", title="Digits, 8x8", title_justify="left"
    )
    for row in pair.rows:
        table.add_row(
            row.model,
            f"{row.params / 1e3:.1f}",
            f"{row.flops / 1e6:.2f}",
            f"{row.top1:.2f}",
            f"{row.seconds:.0f}",
        )
    console.print(table)
    console.print(f"Curves: {pair.curves}", soft_wrap=True)
    run = out / pair.rows[0].model
    console.print("To see what it has learned, on scans that it was not trained on:", highlight=False)
    for command in ("predict {scans}", "explain {scans}/3.png --at 4,3 --stage 2", "explore"):
        line = f"  gsanet {command.format(scans=pair.scans)} --run {run}"
        console.print(escape(line), soft_wrap=True, highlight=False)
    look = look_at_photograph(out)
    console.print("\nA photograph, by the network whose weights come with the package:", highlight=False)
    for part in _show_predictions([look.prediction]):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    console.print(f"Where a pixel of the roof looks in {look.module}: {look.picture}", highlight=False, soft_wrap=True)


ImagesArgument = Annotated[
    list[str], typer.Argument(help="Files, folders (with all below them) and http(s) addresses.")
]
RunOption = Annotated[Path | None, typer.Option("--run", help="A run directory of `gsanet train`; its best weights.")]
ModelOption = Annotated[str, typer.Option("--model", help="Without --run: the network.")]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="Without --run: its weights (safetensors). Default: the package's.")
]
FEW = 8  # images up to which each has a table of its own


@app.command()
def predict(
    images: ImagesArgument,
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    top: Annotated[int, typer.Option(help="How many classes to show, the likeliest first.", min=1)] = 5,
    device: DeviceOption = "",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what images show. An image that cannot be read is named at the end; exit code 1 if none could be."""
    from gsanet.images import find_images
    from gsanet.predict import predict_images

    classifier = _load_classifier(run, model, weights, settings, device)
    sources = find_images(images)
    found = predict_images(classifier, sources, top)
    predictions = list(track(found, description="Predicting", total=len(sources), console=errors, transient=True))
    failed = [prediction for prediction in predictions if prediction.error]
    if as_json:
        print(json.dumps([prediction.to_json() for prediction in predictions], indent=2))
    else:
        for part in _show_predictions([prediction for prediction in predictions if not prediction.error]):
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    _name_failed([each.error for each in failed], len(predictions), "classified")
    if len(failed) == len(predictions):
        raise typer.Exit(1)


@app.command()
def explain(
    image: Annotated[str, typer.Argument(help="A file, or an http(s) address.")],
    at: Annotated[str, typer.Option(help="The pixel, as X,Y: to the right and down from 0,0 at the top left.")],
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    stage: Annotated[int | None, typer.Option(help="Which stage, from 1. Default: 3, else the last with GSA.")] = None,
    block: Annotated[int | None, typer.Option(help="Which block of it, from 1. Default: the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Which head, from 1. Default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="The picture. Default: IMAGE-explain.png, in this folder.")] = None,
    npz: Annotated[Path | None, typer.Option(help="The numbers. Default: as the picture, with .npz.")] = None,
    device: DeviceOption = "",
    settings: Settings = None,
) -> None:
    """Draw where a pixel takes from in a GSA module: the exact weights of content, column and row."""
    import numpy as np

    from gsanet.explain.figure import draw
    from gsanet.explain.image import explain_image, place_of
    from gsanet.images import read_image

    place = _parse_place(at)
    out = out or Path(f"{Path(image).stem}-explain.png")
    npz = npz or out.with_suffix(".npz")
    _check_writable(out, picture=True)
    _check_writable(npz)
    picture = read_image(image)
    classifier = _load_classifier(run, model, weights, settings, device)
    found = explain_image(classifier, picture.image, place, stage, block)
    draw(found, out, head)
    explanation = found.explanation
    arrays: dict[str, Any] = explanation.arrays()
    with npz.open("wb") as stream:  # numpy would add .npz to a name without it
        np.savez_compressed(stream, **arrays)
    if picture.note:
        console.print(f"{image}: {picture.note}", soft_wrap=True, highlight=False)
    (x, y), (height, width) = explanation.pixel, explanation.size
    for line in (
        f"Class: {found.guess.name} ({found.guess.probability:.1%})",
        f"Module: {explanation.module} ({place_of(explanation.module)})",
        f"Its pixel: row {x}, column {y} on a map of {height}x{width}",
        f"Weights times values give the module's output to a relative error of {explanation.error:.0e}.",
        f"Picture: {out}",
        f"Numbers: {npz}",
    ):
        console.print(escape(line), soft_wrap=True, highlight=False)


@app.command("balance")
def show_balance(
    images: ImagesArgument,
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    most: Annotated[int, typer.Option(help="Take at most so many images, evenly from all.", min=1)] = 200,
    device: DeviceOption = "",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each GSA module does over many images: content beside position, and how far they look."""
    from gsanet.explain.branches import balance
    from gsanet.images import UnreadableImageError, find_images, read_image

    classifier = _load_classifier(run, model, weights, settings, device)
    sources = find_images(images)
    sources = sources[:: -(-len(sources) // most)]
    unread: list[str] = []

    def inputs() -> Iterator[Any]:
        for source in track(sources, description="Measuring", console=errors, transient=True):
            try:
                yield classifier.transform(read_image(str(source)).image)
            except UnreadableImageError as error:
                unread.append(str(error))

    try:
        rows = balance(classifier.model, inputs())
    finally:
        _name_failed(unread, len(sources), "read")
    if as_json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=2))
    else:
        for part in _show_balance(rows, classifier.name, len(sources) - len(unread)):
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))


@app.command()
def explore(
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 lets other machines reach it.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Default: 7860, or the next that is free.", min=0, max=65535)] = None,
    device: DeviceOption = "",
    settings: Settings = None,
) -> None:
    """Open a page in the browser: click a pixel of a picture, and see where each branch and head attends."""
    from gsanet.explore.server import check_installed, serve

    check_installed()
    classifier = _load_classifier(run, model, weights, settings, device)
    # So that what was uploaded is removed then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def ready(address: str) -> None:
        console.print(f"The explorer is at {address} (Ctrl+C ends it)", highlight=False, soft_wrap=True)

    serve(classifier, host, port, ready)


def _load_classifier(run: Path | None, model: str, weights: Path | None, settings: Settings, device: str) -> Any:
    """The network that `predict`, `explain` and `explore` are about."""
    from gsanet.devices import check_device
    from gsanet.predict import load_classifier

    if device:
        check_device(device)
    return load_classifier(run, model, weights, _overrides(settings, {}), device or None)


def _name_failed(reasons: Sequence[str], images: int, wanted: str) -> None:
    """Which of so many images could not be read or classified, if any."""
    if reasons:
        lines = [f"{len(reasons)} of {images} images could not be {wanted}:", *reasons]
        errors.print(escape("\n  ".join(lines)), highlight=False, soft_wrap=True, style="yellow")


def _show_predictions(predictions: Sequence[Any]) -> list[Table | str]:
    """A table with bars for each image; of many, one table with a line for each."""
    if len(predictions) > FEW:
        table = Table("Image", "Class", "", "%", "Then", box=None, pad_edge=False)
        for found in predictions:
            first, *others = found.guesses
            then = ", ".join(f"{guess.name} {guess.probability:.0%}" for guess in others)
            image = escape(f"{found.image} ({found.note})" if found.note else found.image)
            table.add_row(image, escape(first.name), _bar(first.probability, 12), _percent(first), escape(then))
        return [table]
    parts: list[Table | str] = []
    for found in predictions:
        title = f"{found.image} ({found.note})" if found.note else found.image
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, max_width=40)
        for guess in found.guesses:
            table.add_row(escape(guess.name), _bar(guess.probability, 30), _percent(guess))
        parts += [f"[bold]{escape(title)}[/]", table]
    return parts


def _show_balance(rows: Sequence[Any], network: str, images: int) -> Iterator[Table | str]:
    """A line for each module, and what its columns mean."""
    from gsanet.explain.image import place_of

    table = Table(title=f"{network}, {images:,} image{'s' if images > 1 else ''}", box=None, pad_edge=False)
    table.add_column("Module", no_wrap=True)
    for heading in ("Map", "Content /\nposition", "Pixels that\nkeys choose", "", "Looks along\na column", "a row"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        lengths = ("" if value is None else f"{value:.1f}" for value in (row.column, row.row))
        table.add_row(
            place_of(row.module),
            "x".join(map(str, row.size)),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.seen is None else f"{row.seen:.1%}",
            "" if row.seen is None else _bar(row.seen, 8),
            *lengths,
        )
    yield table
    yield "Content / position: the sizes of the two outputs that are added."
    yield "Pixels that keys choose: 100 % if the softmax weighs all alike; content attention is then pooling."
    yield "Looks along: the mean distance of what positional attention weighs, in pixels of the map."


def _bar(share: float, width: int) -> Bar:
    return Bar(1.0, 0.0, share, width=width, color="green")


def _percent(guess: Any) -> str:
    return f"{guess.probability:6.1%}"


def _parse_place(text: str) -> tuple[int, int]:
    parts = text.replace(" ", "").split(",")
    if len(parts) != 2 or not all(part.lstrip("-").isdigit() for part in parts):
        raise ValueError(f"--at takes a pixel as X,Y, such as 120,64, got {text!r}")
    return int(parts[0]), int(parts[1])


def _overrides(settings: Sequence[str] | None, options: dict[str, str]) -> dict[str, Any]:
    """What the command line says over the recipe: the options that were given, and then --set."""
    from gsanet.train.recipe import parse_overrides

    return {**{key: value for key, value in options.items() if value}, **parse_overrides(settings or [])}


def _check_writable(file: Path, picture: bool = False) -> None:
    """Refuse a file whose folder is not there, a folder, and a picture whose name does not say its format."""
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent} to write {file.name} into")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give the name of a file")
    if picture and not file.suffix:
        raise ValueError(f"the name of a picture says its format, such as {file}.png, got {file}")


def _say(line: str) -> None:
    """A line about progress, away from what is printed for use."""
    errors.print(line, highlight=False, soft_wrap=True, markup=False)


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
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
