"""A finished run directory as a file of results."""

import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gsanet.models import count_flops, count_parameters
from gsanet.paper.results import Run
from gsanet.paper.settings import changes, portable_settings
from gsanet.train import checkpoint
from gsanet.train.checkpoint import replace_file
from gsanet.train.data.sources import data_name, evaluated_on
from gsanet.train.engine import make_model
from gsanet.train.recipe import Recipe
from gsanet.train.report import read_metrics
from gsanet.train.run_directory import CLASSES, ENVIRONMENT, read_run
from gsanet.train.state import Progress

MEMORY, SPEEDS = "memory.json", "speeds.json"


def record_run(
    out: Path,
    file: Path,
    *,
    recipe_name: str,
    commit: str = "",
    dataset: str = "",
    command: str = "",
    weights: str = "",
    question: str = "",
    rows: Sequence[str] = (),
    notes: str = "",
) -> Run:
    """Write the results of a finished run, `gsanet.paper.results` says what they are.

    Args:
        out: The run directory.
        file: Where to; its name is the run's.
        recipe_name: The recipe that the run was started with.
        commit: The state of the source that made it. Default: what the run directory says of its last process.
        dataset: What it was trained on. Default: the last part of its data's path.
        command: What made it. Default: `gsanet train`, with all that was set over the recipe.
        weights: The run that it started from.
        question: What it was made for, if not for the paper's tables.
        rows: The keys of the rows that it stands for, if not for all of its network.
        notes: For the reader.
    """
    recipe = read_run(out)
    saved, _ = checkpoint.load(out / "last")
    progress = Progress(**saved.state) if saved else Progress()
    total = recipe.steps or (recipe.epochs or 0) * (progress.train_images // recipe.batch_size)
    if progress.step < total or not total:
        raise ValueError(f"{out} is at step {progress.step} of {total}: a run has results when it is finished")
    epochs, last = read_metrics(out, "epoch"), progress.evaluation
    alone = read_speeds(out)
    logged = [row["images_per_second"] for row in read_metrics(out, "train") or epochs]
    session = json.loads((out / ENVIRONMENT).read_text())[-1]
    if not (commit := commit or session["commit"] or ""):
        raise ValueError(
            f"results name the commit that made them, and {out} was made outside of a checkout: --commit HASH"
        )
    model = make_model(recipe, len(json.loads((out / CLASSES).read_text())))
    dataset, holdout = dataset or data_name(recipe.data_path), recipe.data_settings.holdout
    found = Run(
        run=file.stem,
        model=recipe.model,
        recipe=recipe_name,
        dataset=dataset,
        seed=recipe.seed,
        top1=last["top1"],
        command=command or train_command(recipe_name, recipe),
        commit=commit,
        model_kwargs=recipe.model_kwargs,
        top5=last["top5"],
        params=count_parameters(model),
        flops=count_flops(model, recipe.image_size),
        evaluated_on=evaluated_on(dataset, last["images"], holdout),
        holdout=holdout,
        length=f"{recipe.epochs} epochs" if recipe.epochs else f"{recipe.steps:,} steps",
        weights=weights,
        question=question,
        rows=list(rows),
        images_per_second=max(alone) if alone else statistics.median(logged),  # what else there was can only slow it
        memory=read_memory(out),
        seconds=progress.seconds,
        device=session["device"],
        versions={key: session[key] for key in ("gsanet", "torch", "cuda", "python")},
        settings=portable_settings(recipe),
        curve=[{key: value for key, value in row.items() if key != "kind"} for row in epochs],
        notes=notes,
    )
    content = {key: value for key, value in asdict(found).items() if value not in (None, "", [], {})}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps({"kind": "run", **content}, indent=1, allow_nan=False) + "\n").encode())
    return found


def train_command(recipe_name: str, recipe: Recipe) -> str:
    """The command that makes a run again, but for the places of data and run directory."""
    words = ["gsanet", "train", "--recipe", recipe_name]
    for key, value in changes(recipe_name, portable_settings(recipe)).items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return shlex.join(words)


def read_memory(out: Path) -> int | None:
    """The most bytes that a run has held on the GPU, where that is known."""
    file = out / MEMORY
    return json.loads(file.read_text()) if file.exists() else None


def read_speeds(out: Path) -> list[float]:
    """The images a second of the stretches in which a run had the device to itself, where there were any."""
    file = out / SPEEDS
    return json.loads(file.read_text()) if file.exists() else []
