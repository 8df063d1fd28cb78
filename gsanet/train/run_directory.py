"""A run directory: what was run, with what, and where its parts are."""

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import gsanet
from gsanet.provenance import package_commit
from gsanet.train.checkpoint import MANIFEST, explained, go_on, holds_steps, replace_file
from gsanet.train.in_use import is_held
from gsanet.train.recipe import Recipe, load_recipe
from gsanet.train.report import METRICS

RECIPE = "recipe.yaml"
ENVIRONMENT = "environment.json"
CLASSES = "classes.json"


def start_run(out: Path, recipe: Recipe, class_names: list[str]) -> None:
    """Make a run directory; one that already holds a run is left alone, unless that ended before a step was saved."""
    if (out / RECIPE).exists() and _is_begun(out):
        raise ValueError(
            f"{out} already holds a run: go on with `gsanet train --resume {out}`, or choose another --out"
        )
    with explained(f"the run directory {out}"):
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / CLASSES, json.dumps(class_names, indent=1).encode())
        _record_session(out, recipe)
        replace_file(out / RECIPE, recipe.to_yaml().encode())  # last: with it, the run can be resumed


def resume_run(out: Path, recipe: Recipe) -> None:
    """Go on with a run, by a recipe of which what changes nothing that is learned may be another."""
    _record_session(out, recipe)
    with explained(out / RECIPE, go_on(out)):
        replace_file(out / RECIPE, recipe.to_yaml().encode())


def read_run(out: Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The resolved recipe of a run directory, with values set over it."""
    if not (out / RECIPE).exists():
        # A folder of runs, as `gsanet demo` leaves one.
        if inside := sorted(file.parent.name for file in out.glob(f"*/{RECIPE}")):
            raise ValueError(f"{out} holds several runs: choose {' or '.join(str(out / name) for name in inside)}")
        raise FileNotFoundError(f"{out} is no run directory: it has no {RECIPE}")
    return load_recipe(str(out / RECIPE), overrides)


def read_evaluation(out: Path, checkpoint: str) -> dict[str, Any] | None:
    """What `gsanet eval --run` found of the weights as they are now; None if they were trained on since, or never.

    `holdout` is the share of the training images that they were evaluated on, 0 for images of their own.
    """
    file, written = out / f"eval-{checkpoint}.json", out / checkpoint / MANIFEST
    if not file.exists() or (written.exists() and file.stat().st_mtime < written.stat().st_mtime):
        return None
    # Files from before it was written there are of images as the recipe has them.
    return {"holdout": read_run(out).data_settings.holdout, **json.loads(file.read_text())}


def _record_session(out: Path, recipe: Recipe) -> None:
    """Add the software, machine and command of this process to those that have worked on the run."""
    file = out / ENVIRONMENT
    sessions = json.loads(file.read_text()) if file.exists() else []
    with explained(file, go_on(out)):
        replace_file(file, json.dumps([*sessions, _session(recipe)], indent=2).encode())


def _is_begun(out: Path) -> bool:
    """Whether a run has saved a step, or is still being trained."""
    return is_held(out / METRICS) or any(holds_steps(out / name) for name in ("last", "best"))


def _session(recipe: Recipe) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gsanet": gsanet.__version__,
        "commit": package_commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if gpu else platform.processor(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "seed": recipe.seed,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
