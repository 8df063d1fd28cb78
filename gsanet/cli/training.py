"""`gsanet train`, `eval`, `recipes`, `preview` and `demo`."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from gsanet.cli.common import AsJson, Settings, check_writable, console, print_parts, read_overrides, say
from gsanet.cli.looking import show_predictions

CHANGEABLE = ("data.max_bad_fraction", "data.workers")  # when a run goes on

recipes = typer.Typer(help="The recipes for training.")


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
        changes = read_overrides(settings, {})
        if recipe or model or data or out or weights or not changes.keys() <= set(CHANGEABLE):
            raise ValueError(
                "--resume goes on with a run as it was started: give no other option with it, but --set of "
                f"{' and '.join(CHANGEABLE)}, which change nothing that is learned"
            )
        result = run(read_run(resume, changes), resume, resume=True)
    else:
        if not recipe or out is None:
            raise ValueError("give --recipe NAME and --out DIR to start a run, or --resume DIR to go on with one")
        overrides = read_overrides(settings, {"model": model, "weights": weights, "data.path": data})
        result = run(load_recipe(recipe, overrides), out)
    PartialState().destroy_process_group()
    if result.stopped_by:
        raise typer.Exit(128 + result.stopped_by)


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
    from gsanet.models.registry import check_name
    from gsanet.train.checkpoint import explained, replace_file
    from gsanet.train.evaluate import overflow_words
    from gsanet.train.evaluate_weights import evaluate_weights, weights_recipe
    from gsanet.train.recipe import load_recipe
    from gsanet.train.run_directory import read_run

    overrides = read_overrides(settings, {"model": model, "data.path": data})
    file: Path | None = None
    if run is not None and weights is None:
        chosen, source, file = read_run(run, overrides), run / checkpoint, run / f"eval-{checkpoint}.json"
    elif run is None and (weights is not None or model or recipe):
        if weights is None:
            name = model or load_recipe(recipe).model
            check_name(name)
            source = shipped_weights(name)
        else:
            source, file = weights, weights.with_suffix(".eval.json")
        chosen = load_recipe(recipe, overrides) if recipe else weights_recipe(source, model, overrides)
    else:
        raise ValueError(
            "give either --run DIR, or --data PATH with --model NAME (its weights in the package) or --weights FILE"
        )
    found = evaluate_weights(chosen, source, say)
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

    check_writable(out, picture=True)
    draw_preview(load_recipe(recipe, read_overrides(settings, {"data.path": data})), out, images, epochs)
    console.print(f"written: {out}", soft_wrap=True, highlight=False)


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
    print_parts(show_predictions([look.prediction]))
    console.print(f"Where a pixel of the roof looks in {look.module}: {look.picture}", highlight=False, soft_wrap=True)
