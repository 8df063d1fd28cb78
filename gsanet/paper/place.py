"""Where the experiments are on this machine, how far they are, and which process makes which."""

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gsanet.paper.matrix import Experiment
from gsanet.train import checkpoint
from gsanet.train.run_directory import RECIPE

WORK, RESULTS = Path("runs/paper"), Path("results")


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

    def images_left(self, experiment: Experiment) -> int:
        """How many images a run has still to learn from, one seen twice counted twice."""
        return (experiment.steps - self.steps_done(experiment)) * experiment.recipe.batch_size

    def obstacle(self, experiment: Experiment) -> str:
        """Why a run cannot be begun; nothing if it can."""
        wanted = experiment.weights
        if not wanted or self.weights(wanted).exists() or self.run(experiment.name).joinpath(RECIPE).exists():
            return ""
        if self.result(wanted).exists():
            return f"{wanted} is done, but its weights are not here: bring {self.weights(wanted)}, or make it again"
        return f"waits for {wanted}, whose weights it starts from"

    def lock(self, name: str) -> Path:
        """The file that the process which makes a run has locked."""
        return self.work / f"{name}.lock"

    def failure(self, name: str) -> Path:
        """Why a run failed when it was last tried."""
        return self.work / f"{name}.failed"

    def failed_since(self, name: str, moment: float) -> bool:
        """Whether a run failed after a moment, in seconds as `time.time` counts them."""
        try:
            return self.failure(name).stat().st_mtime >= moment
        except FileNotFoundError:
            return False

    def is_settled(self, name: str, began: float) -> bool:
        """Whether a run has results, or failed in a process that was started at that moment or since."""
        return self.result(name).exists() or self.failed_since(name, began)

    def is_being_made(self, name: str) -> bool:
        """Whether another process makes a run now."""
        if not self.lock(name).exists():
            return False
        with self.lock(name).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


@contextmanager
def claim(experiments: Iterable[Experiment], place: Place, began: float) -> Iterator[Experiment | None]:
    """The first run that can be made and that no other process is making; None if there is none.

    It is this process's own until the end of the context, or of the process.

    Args:
        experiments: In this order.
        place: Where they are.
        began: When this process did: what has failed since then is passed over.
    """
    for experiment in experiments:
        if place.obstacle(experiment):
            continue
        place.work.mkdir(parents=True, exist_ok=True)
        with place.lock(experiment.name).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            # It may have been finished, or have failed, since it was looked for.
            if not place.is_settled(experiment.name, began):
                yield experiment
                return
    yield None
