"""What was measured here: the files in `results/`, read and checked.

A folder of results holds one JSON object a file, `NAME.json` or `runs/NAME.json`, of two kinds.

A finished training run (`"kind": "run"`, or no kind):

    run                 its name
    model, model_kwargs the network, as `gsanet.create_model(model, **model_kwargs)` makes it
    recipe, dataset     as `gsanet train` was told them; together with the seed they say what was trained
    seed                a whole number
    top1                percent, of the weights at the end of the run, not of the best on the way
    command, commit     the command that made it, and the commit of this repository that ran it

and, where known:

    top5                percent
    evaluated_on        which images, in words
    holdout             the share of the training images that these were, where a recipe was to be chosen: such a run
                        stands for no row of a table
    question            what it was made for, where it stands for no row of a table although its network is one's
    length, weights     such as `20 epochs`; and the run that it started from
    params, flops       of one image, a multiplication and an addition are two
    images_per_second   of training, the median; where runs share a GPU, the fastest stretch that each has to itself
    memory              bytes, the peak of training, with the images that lie on the device
    seconds, device     of the whole run; in words
    versions, settings  of the software; the recipe with everything resolved
    curve               the metrics of each epoch
    notes               for the reader
    rows                keys of rows of the paper's tables, such as `"table4: Content, Col."` (each `gsanet paper tableN
                        --json` gives them), that the run stands for although its network is not the row's own,
                        because it is a smaller one. Without `rows` a run stands for each row of its network, whatever
                        the image size, the number of classes and the stem

What `gsanet bench --out FILE` writes (`"kind": "bench"`): `setting`, `environment`, and a list `networks`, each with
`model`, `model_kwargs` and its measurements, of which the tables show `latency_ms`.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gsanet.models.described import TRAINING
from gsanet.paper.printed import Network, PrintedRow, printed_tables
from gsanet.paper.settings import training

FOLDER = Path("results")

# Options that fit a network to its images or train it, and do not make it another row of a table.
SETTINGS = {"img_size", "num_classes", "in_chans", "stem", "keep_reach", *TRAINING}
DEFAULTS: dict[str, Any] = {"content": True, "column": True, "row": True, "groups": (1, 2, 3, 4)}


@dataclass(frozen=True)
class Run:
    """A finished training run: the fields are the keys of its file, explained above."""

    run: str
    model: str
    recipe: str
    dataset: str
    seed: int
    top1: float
    command: str
    commit: str
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    top5: float | None = None
    params: int | None = None
    flops: int | None = None
    evaluated_on: str = ""
    holdout: float = 0.0
    question: str = ""
    length: str = ""
    weights: str = ""
    images_per_second: float | None = None
    memory: int | None = None
    seconds: float | None = None
    device: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    notes: str = ""

    @property
    def network(self) -> Network:
        """Which network it is, whatever the size of its images."""
        return plain_network(self.model, self.model_kwargs)

    @property
    def training(self) -> str:
        """How it was trained, in words: the recipe, and what was set over it."""
        return training(self.recipe, self.settings)


@dataclass(frozen=True)
class Latency:
    """How long one image takes, by a file that `gsanet bench` wrote."""

    network: Network
    milliseconds: float
    device: str
    dtype: str
    img_size: str


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results."""

    runs: list[Run] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)

    def runs_of(self, row: PrintedRow) -> list[Run]:
        """The runs that stand for a row of the paper's tables."""
        return [
            run
            for run in self.runs
            if not (run.holdout or run.question) and (row.key in run.rows if run.rows else run.network == row.network)
        ]

    def latencies_of(self, row: PrintedRow) -> list[Latency]:
        """The measured runtimes of a row's network."""
        return [latency for latency in self.latencies if latency.network == row.network]


def without_seed(name: str) -> str:
    """What all seeds of a run are called."""
    return name.split("-seed")[0]


def plain_network(model: str, kwargs: dict[str, Any]) -> Network:
    """A network without the options that only fit it to its images, and without those that are the default."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}
    kept = {
        name: value
        for name, value in sorted(options.items())
        if name not in SETTINGS and not (name in DEFAULTS and value in (None, DEFAULTS[name]))
    }
    return Network(model, tuple(kept.items()))


def read_results(folder: Path = FOLDER) -> Results:
    """Read all files of a folder; one that is not as described above is refused by name."""
    if not folder.is_dir():
        if folder == FOLDER:
            return Results()
        raise ValueError(f"no folder of results at {folder}")
    runs: list[Run] = []
    latencies: list[Latency] = []
    files = [*folder.glob("*.json"), *folder.glob("runs/*.json")]
    for file in sorted(files, key=lambda file: (file.parent, file.stem)):  # a run comes before its variants, NAME-...
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("must hold one JSON object")
            kind = content.pop("kind", "run")
            if kind == "run":
                runs.append(parse_run(content))
            elif kind == "bench":
                latencies += _parse_bench(content)
            else:
                raise ValueError(f"kind must be 'run' or 'bench', got {kind!r}")
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}: {problem}") from error
    return Results(runs, latencies)


_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run", "model", "recipe", "dataset", "command", "commit", "device", "notes"), (str,)),
    **dict.fromkeys(("evaluated_on", "question", "length", "weights"), (str,)),
    **dict.fromkeys(("seed", "params", "flops", "memory"), (int,)),
    **dict.fromkeys(("top1", "top5", "holdout", "images_per_second", "seconds"), _NUMBER),
    **dict.fromkeys(("model_kwargs", "versions", "settings"), (dict,)),
    **dict.fromkeys(("rows", "curve"), (list,)),
}


def parse_run(content: dict[str, Any]) -> Run:
    """A run from its JSON object."""
    known = {item.name for item in fields(Run)}
    if unknown := sorted(set(content) - known):
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    needed = ("run", "model", "recipe", "dataset", "seed", "top1", "command", "commit")
    if missing := [name for name in needed if name not in content]:
        raise ValueError(f"{', '.join(missing)} missing")
    for name, value in content.items():
        if value is None and name not in needed:
            continue
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise ValueError(f"{name} must be {' or '.join(kind.__name__ for kind in _TYPES[name])}, got {value!r}")
        if value == "" and name in needed:
            raise ValueError(f"{name} must not be empty")
    for name in ("top1", "top5"):
        if (value := content.get(name)) is not None and not 0 <= value <= 100:
            raise ValueError(f"{name} must be a percentage, got {value}")
    keys = {row.key for table in printed_tables().values() for row in table.rows}
    if strange := [row for row in content.get("rows") or [] if row not in keys]:
        raise ValueError(f"no row of the paper's tables is called {strange[0]!r}")
    return Run(**{name: value for name, value in content.items() if value is not None})


def _parse_bench(content: dict[str, Any]) -> list[Latency]:
    setting, environment = content["setting"], content["environment"]
    return [
        Latency(
            network=plain_network(row["model"], row["model_kwargs"]),
            milliseconds=float(row["latency_ms"]),
            device=environment["device"],
            dtype=setting["dtype"],
            img_size=str(setting["img_size"]),
        )
        for row in content["networks"]
        if row["latency_ms"] is not None
    ]
