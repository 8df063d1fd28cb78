"""What the experiments still take."""

from collections.abc import Iterable
from functools import cached_property

from gsanet.paper.matrix import Experiment, matrix
from gsanet.paper.place import Place
from gsanet.paper.results import read_results, without_seed
from gsanet.train.report import duration


class Pace:
    """How long runs take, by those that are finished, each alone on the device.

    Args:
        place: Where the results are.
    """

    def __init__(self, place: Place) -> None:
        runs = read_results(place.results).runs if place.results.is_dir() else []
        self._runs = {run.run: run for run in runs if run.run in matrix()}

    @cached_property
    def _rate(self) -> float | None:
        """Operations of forward passes a second, over all runs."""
        work = seconds = 0.0
        for run in self._runs.values():
            if run.flops and run.images_per_second:
                images = matrix()[run.run].steps * matrix()[run.run].recipe.batch_size
                work += run.flops * images
                seconds += images / run.images_per_second
        return work / seconds if seconds else None

    def seconds(self, experiment: Experiment, images: int) -> float | None:
        """What so many images of a run take; None: unknown.

        At the speed of its other seeds, or that of the matrix, or by its operations.
        """
        seed = self._runs.get(without_seed(experiment.name))
        speed = (seed and seed.images_per_second) or experiment.images_per_second
        if speed:
            return images / speed
        return images * experiment.flops / self._rate if self._rate else None


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
    lines, total, work, times = [], 0, 0.0, []
    pace = Pace(place) if detailed else None
    for experiment in waiting:
        done = place.steps_done(experiment)
        images = place.images_left(experiment)
        total += images
        cost = f"{images / 1e6:.2f} M images"
        if pace:
            work += images * experiment.flops
            cost += f" of {experiment.flops / 1e9:.2f} GFLOPs"
            if (seconds := pace.seconds(experiment, images)) is not None:
                times.append(seconds)
                cost += f", about {duration(seconds)}"
        state = place.obstacle(experiment) or (f"at step {done:,} of {experiment.steps:,}" if done else "not begun")
        lines.append(f"  {experiment.name}: {cost}, {state}")
    summary = f"Left: {len(waiting)} runs, {total / 1e6:.1f} M images"
    if pace:
        summary += f", {work:.2e} FLOPs of forward passes"
    if times:
        summary += f", about {duration(sum(times))} at the speed of the finished runs"
    return [summary, *lines]
