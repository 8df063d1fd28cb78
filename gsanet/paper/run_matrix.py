"""Make the experiments of `matrix.yaml`, in as many stretches of time as it takes.

    python -m gsanet.paper.run_matrix gsa38 conv38 --data tinyimagenet=FOLDER --stop-after 540

is `gsanet paper run`, for machines that have no terminal libraries. Each run has a directory in the work folder, from
which it goes on where it was cut. A finished one leaves `results/runs/NAME.json`, and is not made again; its weights
stay in the work folder as `weights/NAME.safetensors`, for the runs that start from them. Several processes with one
work folder share the runs, and the GPU; each run's speed is measured while the others wait.
"""

import argparse
import fcntl
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGALRM
from typing import Any

import torch
import yaml

from gsanet.pack import pack
from gsanet.paper.matrix import Experiment, choose, matrix
from gsanet.paper.record import MEMORY, SPEEDS, read_memory, read_speeds, record_run
from gsanet.paper.results import Run, read_results
from gsanet.paper.settings import portable_settings
from gsanet.paper.turns import Turns
from gsanet.provenance import package_commit
from gsanet.train import checkpoint
from gsanet.train.checkpoint import replace_file
from gsanet.train.data.memory import decoded_once
from gsanet.train.engine import Result, train
from gsanet.train.recipe import Recipe, make_recipe
from gsanet.train.report import duration
from gsanet.train.run_directory import RECIPE, read_run
from gsanet.train.state import DivergedError

WORK, RESULTS = Path("runs/paper"), Path("results")
LEAST = 30  # seconds; with less left, no run is begun
TIMED = 40  # steps, each time that a run's speed is measured


@dataclass(frozen=True)
class Place:
    """Where things are on this machine.

    Args:
        work: The folder of run directories.
        results: The folder of results.
        data: The data sets by name, each as `gsanet train --data` takes it. Default: `data/NAME`.
    """

    work: Path = WORK
    results: Path = RESULTS
    data: Mapping[str, str] | None = None

    def run(self, name: str) -> Path:
        """A run's directory."""
        return self.work / name

    def weights(self, name: str) -> Path:
        """A finished run's weights."""
        return self.work / "weights" / f"{name}.safetensors"

    def result(self, name: str) -> Path:
        """A finished run's results."""
        return self.results / "runs" / f"{name}.json"

    def data_path(self, dataset: str) -> str:
        """A data set."""
        return (self.data or {}).get(dataset, f"data/{dataset}")

    def steps_done(self, experiment: Experiment) -> int:
        """How far a run is."""
        if self.result(experiment.name).exists():
            return experiment.steps
        file = self.run(experiment.name) / "last" / checkpoint.MANIFEST
        return json.loads(file.read_text())["state"]["step"] if file.exists() else 0

    def obstacle(self, experiment: Experiment) -> str:
        """Why a run cannot be begun; nothing if it can."""
        wanted = experiment.weights
        if not wanted or self.weights(wanted).exists() or self.run(experiment.name).joinpath(RECIPE).exists():
            return ""
        if self.result(wanted).exists():
            return f"{wanted} is done, but its weights are not here: bring {self.weights(wanted)}, or make it again"
        return f"waits for {wanted}, whose weights it starts from"


def run_experiments(
    experiments: Sequence[Experiment],
    place: Place,
    commit: str,
    *,
    stop_after: float | None = None,
    compile: bool = False,
    graphs: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Make experiments one after the other; those with results, and those that another process makes, are passed over.

    Args:
        experiments: In this order.
        place: Where data, runs and results are.
        commit: The state of the source that is running.
        stop_after: Save and stop after so many seconds.
        compile: Use torch.compile; what it cannot compile runs as it is.
        graphs: Use CUDA graphs on a GPU.
        say: Called with a line about each run.

    Returns:
        The exit code: 0, also when the time was up; 1 if a run diverged or memory ran out; 128 and more for a signal.
    """
    deadline = None if stop_after is None else time.monotonic() + stop_after
    failed = 0
    for name in (experiment.name for experiment in experiments):
        if place.result(name).exists():
            say(f"{name}: done before ({place.result(name)})")
    waiting = list(experiments)
    while (left := None if deadline is None else deadline - time.monotonic()) is None or left >= LEAST:
        # From the start each time: a run may have waited for the weights of the last.
        waiting = [experiment for experiment in waiting if not place.result(experiment.name).exists()]
        with _claim(waiting, place) as experiment:
            if experiment is None:
                break
            waiting.remove(experiment)
            name = experiment.name
            say(f"{name}: {experiment.network}, from step {place.steps_done(experiment):,} of {experiment.steps:,}")
            try:
                result = _train(experiment, place, left, compile, graphs)
            except (DivergedError, torch.OutOfMemoryError) as error:
                say(f"{name}: {error}")
                failed = 1
                continue
            if result.stopped_by is not None:
                if result.stopped_by != SIGALRM:
                    return 128 + result.stopped_by
                break
            found = _record(experiment, place, result, commit)
            say(f"{name}: top-1 {found.top1:.2f} %, top-5 {found.top5:.2f} % -> {place.result(name)}")
    for line in plan_lines(experiments, place, detailed=False):
        say(line)
    return failed


@contextmanager
def _claim(experiments: Iterable[Experiment], place: Place) -> Iterator[Experiment | None]:
    """The first run that can be made and that no other process is making; None if there is none.

    It is this process's own until the end of the context, or of the process.
    """
    for experiment in experiments:
        if place.obstacle(experiment):
            continue
        place.work.mkdir(parents=True, exist_ok=True)
        with place.work.joinpath(f"{experiment.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if not place.result(experiment.name).exists():  # it may have been finished since it was looked for
                yield experiment
                return
    yield None


def plan_lines(experiments: Iterable[Experiment], place: Place, detailed: bool = True) -> list[str]:
    """A line for each run that is not done, and what all of them still take.

    Args:
        experiments: The runs.
        place: Where data, runs and results are.
        detailed: With operations, and times if some runs have results. Counting takes a second for each network.
    """
    waiting = [experiment for experiment in experiments if not place.result(experiment.name).exists()]
    if not waiting:
        return ["Nothing is left: all of these runs have results."]
    lines, total, work = [], 0, 0.0
    rate = _rate(place) if detailed else None
    for experiment in waiting:
        done = place.steps_done(experiment)
        images = (experiment.steps - done) * experiment.recipe.batch_size
        total += images
        cost = f"{images / 1e6:.2f} M images"
        if detailed:
            work += images * experiment.flops
            cost += f" of {experiment.flops / 1e9:.2f} GFLOPs"
        if rate:
            cost += f", about {duration(images * experiment.flops / rate)}"
        state = place.obstacle(experiment) or (f"at step {done:,} of {experiment.steps:,}" if done else "not begun")
        lines.append(f"  {experiment.name}: {cost}, {state}")
    summary = f"Left: {len(waiting)} runs, {total / 1e6:.1f} M images"
    if detailed:
        summary += f", {work:.2e} FLOPs of forward passes"
    if rate:
        summary += f", about {duration(work / rate)} at the speed of the finished runs"
    return [summary, *lines]


def _rate(place: Place) -> float | None:
    """Operations of forward passes a second, over all finished runs of the matrix, each alone on the device."""
    known = matrix()
    runs = read_results(place.results).runs if place.results.is_dir() else []
    timed = [
        (run.flops, known[run.run].steps * known[run.run].recipe.batch_size, run.images_per_second)
        for run in runs
        if run.run in known and run.flops and run.images_per_second
    ]
    work = sum(flops * images for flops, images, _ in timed)
    return work / sum(images / speed for _, images, speed in timed) if timed else None


def _train(experiment: Experiment, place: Place, stop_after: float | None, compile: bool, graphs: bool) -> Result:
    """Begin a run, or go on with it."""
    out = place.run(experiment.name)
    data_path = place.data_path(experiment.dataset)
    here: dict[str, Any] = {"data.path": data_path, "compile": compile, "cuda_graphs": graphs}
    if experiment.weights:
        here["weights"] = str(place.weights(experiment.weights))
    resume = (out / RECIPE).exists()
    recipe = read_run(out, here) if resume else _with(experiment.recipe, here)
    if resume and portable_settings(recipe) != portable_settings(experiment.recipe):
        raise ValueError(f"{out} was begun with another recipe than the matrix has now: move it away")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if compile:
        torch._dynamo.reset()
        torch._dynamo.config.suppress_errors = True

    def keep_speed(seconds: float) -> None:
        speed = timed_steps(experiment)[1] * recipe.batch_size / seconds
        replace_file(out / SPEEDS, json.dumps([*read_speeds(out), speed]).encode())

    try:
        with Turns(place.work, *timed_steps(experiment), keep_speed) as turns:
            return train(recipe, out, resume=resume, stop_after=stop_after, before_step=turns)
    finally:
        if torch.cuda.is_available() and out.is_dir():
            replace_file(
                out / MEMORY, json.dumps(max(torch.cuda.max_memory_allocated(), read_memory(out) or 0)).encode()
            )
        gc.collect()  # so that the next network finds the memory free


def timed_steps(experiment: Experiment) -> tuple[list[int], int]:
    """Where a run's speed is measured, and over how many steps: three times, away from the ends of epochs.

    An epoch may end with an evaluation, which is not what is measured.
    """
    per_epoch = min(experiment.steps_per_epoch, experiment.steps)
    epochs = experiment.steps // per_epoch
    return [epochs * part // 6 * per_epoch + per_epoch // 4 for part in (1, 3, 5)], min(TIMED, per_epoch // 2)


def _record(experiment: Experiment, place: Place, result: Result, commit: str) -> Run:
    """Write a finished run's results and weights."""
    out, name = result.out, experiment.name
    whole = experiment.train_images - experiment.held_out
    if result.progress.train_images != whole:
        raise ValueError(
            f"{out} was trained on {result.progress.train_images:,} images, where {experiment.dataset} has {whole:,}: "
            f"give the whole data set, --data {experiment.dataset}=PATH"
        )
    place.weights(name).parent.mkdir(parents=True, exist_ok=True)
    pack(out, place.weights(name))
    return record_run(
        out,
        place.result(name),
        recipe_name=experiment.recipe_name,
        commit=commit,
        dataset=experiment.dataset,
        command=f"gsanet paper run {name}",
        weights=experiment.weights,
    )


def _with(recipe: Recipe, here: Mapping[str, Any]) -> Recipe:
    return make_recipe(yaml.safe_load(recipe.to_yaml()), here)


def run_command(
    names: Sequence[str],
    *,
    everything: bool = False,
    table: int | None = None,
    list_only: bool = False,
    data: Sequence[str] = (),
    work: Path = WORK,
    results: Path = RESULTS,
    stop_after: float | None = None,
    compile: bool = False,
    graphs: bool = False,
    commit: str = "",
    say: Callable[[str], None] = print,
) -> int:
    """What `gsanet paper run` does; the options are explained there. Returns the exit code."""
    if not (names or everything or table or list_only):
        raise ValueError("say which runs: NAME..., --table N or --all; --list shows them")
    places = dict(pair.partition("=")[::2] for pair in data)
    if wrong := [
        name for name in places if name not in {each.dataset for each in matrix().values()} or not places[name]
    ]:
        raise ValueError(f"--data takes DATASET=PATH, such as tinyimagenet=FOLDER, got {wrong[0]!r}")
    experiments = choose(["*"] if everything or not (names or table) else names, table)
    place = Place(work, results, places)
    if list_only:
        for line in plan_lines(experiments, place):
            say(line)
        return 0
    commit = commit or package_commit() or ""
    if not commit:
        raise ValueError("results name the commit that made them, and this is no checkout: say which, --commit HASH")
    with decoded_once():
        return run_experiments(
            experiments, place, commit, stop_after=stop_after, compile=compile, graphs=graphs, say=say
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command, without typer."""
    parser = argparse.ArgumentParser(prog="python -m gsanet.paper.run_matrix", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="names or patterns, such as 'cifar100-*'")
    parser.add_argument("--all", action="store_true", dest="everything", help="all runs of the matrix")
    parser.add_argument("--table", type=int, choices=range(2, 7), help="the runs of a table of the paper")
    parser.add_argument("--list", action="store_true", dest="list_only", help="what is left, and no more")
    parser.add_argument("--data", action="append", default=[], metavar="DATASET=PATH", help="default: data/DATASET")
    parser.add_argument("--work", type=Path, default=WORK, help="the folder of run directories")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and stop after so long")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--graphs", action="store_true", help="use CUDA graphs")
    parser.add_argument("--commit", default="", help="the commit that runs; default: the checkout's")
    options = vars(parser.parse_args(arguments))
    try:
        return run_command(options.pop("names"), **options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
