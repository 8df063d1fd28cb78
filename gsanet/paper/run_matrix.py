"""Make the experiments of `matrix.yaml`, in as many stretches of time as it takes.

    python -m gsanet.paper.run_matrix gsa38 conv38 --data tinyimagenet=FOLDER --stop-after 540

is `gsanet paper run`, for machines that have no terminal libraries. Each run has a directory in the work folder, from
which it goes on where it was cut. A finished one leaves `results/runs/NAME.json`, and is not made again; its weights
stay in the work folder as `weights/NAME.safetensors`, for the runs that start from them. Several processes with one
work folder, as --processes starts them, share the runs and the GPU; each run's speed is measured while the others wait.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGALRM
from typing import Any

import torch
import yaml

from gsanet.pack import pack
from gsanet.paper.matrix import Experiment, choose, matrix
from gsanet.paper.place import RESULTS, WORK, Place, claim
from gsanet.paper.plan import Pace, plan_lines
from gsanet.paper.processes import run_processes
from gsanet.paper.record import MEMORY, SPEEDS, read_memory, read_speeds, record_run
from gsanet.paper.results import Run
from gsanet.paper.settings import portable_settings
from gsanet.paper.turns import Turns
from gsanet.provenance import package_commit
from gsanet.train.checkpoint import replace_file
from gsanet.train.data.memory import decoded_once
from gsanet.train.engine import Result, train
from gsanet.train.recipe import Recipe, make_recipe
from gsanet.train.run_directory import RECIPE, read_run
from gsanet.train.state import DivergedError

LEAST = 30  # seconds; with less left, no run is begun
PATIENCE = 2.0  # seconds between two looks at what others make
TIMED = 40  # steps, each time that a run's speed is measured


def run_experiments(
    experiments: Sequence[Experiment],
    place: Place,
    commit: str,
    *,
    stop_after: float | None = None,
    whole: bool = False,
    compile: bool = False,
    graphs: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Make experiments one after the other; those with results, and those that another process makes, are passed over.

    So are those that have failed since the start, here or in another process that was started at the same time.

    Args:
        experiments: In this order.
        place: Where data, runs and results are.
        commit: The state of the source that is running.
        stop_after: Save and stop after so many seconds.
        whole: Begin only what can be finished by then.
        compile: Use torch.compile; what it cannot compile runs as it is.
        graphs: Use CUDA graphs on a GPU.
        say: Called with a line about each run.

    Returns:
        The exit code: 0, also when the time was up; 1 if a run diverged or failed; 128 and more for a signal.
    """
    deadline = None if stop_after is None else time.monotonic() + stop_after
    began = time.time()
    failed = 0
    waiting = list(experiments)
    while (left := None if deadline is None else deadline - time.monotonic()) is None or left >= LEAST:
        # From the start each time: a run may have waited for the weights of the last.
        waiting = [experiment for experiment in waiting if not place.is_settled(experiment.name, began)]
        fits = _fitting(place, left) if whole and left is not None else lambda experiment: True
        with claim(filter(fits, waiting), place, began) as experiment:
            if experiment is None:
                if not _may_come(waiting, fits, place):
                    break
                _wait_for_others()
                continue
            waiting.remove(experiment)
            name = experiment.name
            say(f"{name}: {experiment.network}, from step {place.steps_done(experiment):,} of {experiment.steps:,}")
            try:
                result = _train(experiment, place, left, compile, graphs)
            except (DivergedError, RuntimeError) as error:
                # A RuntimeError: no more memory, or what torch cannot do with this network. The others may still work.
                why = str(error) if isinstance(error, DivergedError) else f"failed\n{traceback.format_exc()}"
                say(f"{name}: {why}")
                replace_file(place.failure(name), why.encode())
                failed = 1
                continue
            if result.stopped_by is not None:
                if result.stopped_by != SIGALRM:
                    return 128 + result.stopped_by
                break
            found = _record(experiment, place, result, commit)
            say(f"{name}: top-1 {found.top1:.2f} %, top-5 {found.top5:.2f} % -> {place.result(name)}")
    return failed


def _fitting(place: Place, left: float) -> Callable[[Experiment], bool]:
    """Whether a run can be finished in so many seconds, while those that are being made take their share of the device.

    It is taken to fit if its time is not known. To know it may mean to build the network: each is asked for when its
    turn comes, and not before.
    """
    pace = Pace(place)
    sharing = 1 + sum(map(place.is_being_made, matrix()))

    def fits(experiment: Experiment) -> bool:
        return (pace.seconds(experiment, place.images_left(experiment)) or 0.0) * sharing <= left

    return fits


def _may_come(waiting: Sequence[Experiment], fits: Callable[[Experiment], bool], place: Place) -> bool:
    """Whether a run that could not be begun now may be later.

    Another process may be making the weights that it starts from; those at work may leave it more of the device; or
    another has only looked whether it is being made, at the same moment.
    """
    return any(
        place.is_being_made(experiment.weights)
        if place.obstacle(experiment)
        else any(map(place.is_being_made, matrix())) or fits(experiment)
        for experiment in waiting
        if not place.is_being_made(experiment.name)
    )


def _wait_for_others() -> None:
    time.sleep(PATIENCE)


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
    starts, length = timed_steps(experiment)

    def keep_speed(seconds: float) -> None:
        speed = length * recipe.batch_size / seconds
        replace_file(out / SPEEDS, json.dumps([*read_speeds(out), speed]).encode())

    try:
        with Turns(place.work, starts, length, keep_speed) as turns:
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
        question=experiment.question,
        rows=experiment.rows,
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
    whole: bool = False,
    processes: int = 1,
    compile: bool = False,
    graphs: bool = False,
    commit: str = "",
    part: bool = False,
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
    if whole and stop_after is None:
        raise ValueError("--whole begins what can be finished in time: say how long there is, --stop-after SECONDS")
    if processes < 1:
        raise ValueError(f"--processes must be 1 or more, got {processes}")
    for experiment in experiments:
        if place.result(experiment.name).exists() and not part:
            say(f"{experiment.name}: done before ({place.result(experiment.name)})")
    if processes > 1:
        options: dict[str, Any] = {"--work": work, "--results": results, "--commit": commit, "--stop-after": stop_after}
        flags = {"--whole": whole, "--compile": compile, "--graphs": graphs, "--part": True}
        arguments = [
            *(experiment.name for experiment in experiments),
            *(word for pair in data for word in ("--data", pair)),
            *(str(word) for pair in options.items() if pair[1] is not None for word in pair),
            *(flag for flag, given in flags.items() if given),
        ]
        code = run_processes(processes, "gsanet.paper.run_matrix", arguments, say)
    else:
        with decoded_once():
            code = run_experiments(
                experiments, place, commit, stop_after=stop_after, whole=whole, compile=compile, graphs=graphs, say=say
            )
    if not part:
        for line in plan_lines(experiments, place, detailed=False):
            say(line)
    return code


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
    parser.add_argument("--whole", action="store_true", help="begin only what can be finished by then")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="so many runs at a time")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--graphs", action="store_true", help="use CUDA graphs")
    parser.add_argument("--commit", default="", help="the commit that runs; default: the checkout's")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)  # one of these processes
    options = vars(parser.parse_args(arguments))
    try:
        return run_command(options.pop("names"), **options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
