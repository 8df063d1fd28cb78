"""The registry of cases: what is compared, and what a comparison gives.

A case is a generator of rows; each row has its sides measured in this process, ours first. Cases of one family share
compiled networks, so that none is compiled twice; between families everything is let go.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Setting:
    """What one run of the benchmarks is made at.

    Args:
        device: `cpu` or `cuda`.
        dtype: Other than float32 is autocast in training, and the dtype of the weights in inference.
        batch: Images in a batch; latency is of one image, and 64x64 images come in batches twice as large.
        seconds: How long each side of a row is timed.
        compiled: Networks and modules go through `torch.compile`; on a CPU networks are tried as they are, too.
        autotune: Also try `torch.compile` in its mode `max-autotune-no-cudagraphs`, on all sides.
        graphs: Also try whole steps as CUDA graphs, on all sides.
        img_size: Height and width of the images.
        judged: This is the machine and the setting that the goals are set for.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    seconds: float = 1.0
    compiled: bool = False
    autotune: bool = False
    graphs: bool = False
    img_size: int = 224
    judged: bool = False

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"

    def as_json(self) -> dict[str, Any]:
        """What a file of results says of it; which modes were tried, its rows say."""
        names = ("batch", "img_size", "compiled")
        return {"dtype": str(self.dtype).removeprefix("torch."), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Target:
    """What a row is held to on the machine that the goals are set for.

    Args:
        must_beat: The least that is accepted.
        goal: What is wanted.
        of: The ratio of the sides, or the value of our own side.
    """

    must_beat: float
    goal: float
    of: Literal["ratio", "value"] = "ratio"


@dataclass(frozen=True)
class Row:
    """One thing measured on several sides, in one unit; ours is the first.

    Args:
        what: The row's name.
        unit: Of the sides' values.
        sides: Value of each side; a side that failed is missing.
        ours: The name of our side.
        better: Which values are better.
        target: What the row is held to, if anything.
        modes: How each side was run: the fastest of those tried.
        errors: One line for each side, or side and mode, that failed.
        floors: Values that no implementation can pass, by what bounds them.
    """

    what: str
    unit: str
    sides: Mapping[str, float]
    ours: str
    better: Better
    target: Target | None = None
    modes: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)

    @property
    def rival(self) -> str | None:
        """The best of the other sides."""
        others = {name: value for name, value in self.sides.items() if name != self.ours}
        best = max if self.better == "higher" else min
        return best(others, key=others.__getitem__) if others else None

    @property
    def ratio(self) -> float | None:
        """Our value over the best other one."""
        if self.ours not in self.sides or self.rival is None:
            return None
        return self.sides[self.ours] / self.sides[self.rival]

    @property
    def fraction_of_floor(self) -> float | None:
        """How near our side comes to the bytes that must move: 1 is all the way."""
        if self.ours not in self.sides or "bytes" not in self.floors:
            return None
        return self.floors["bytes"] / self.sides[self.ours]

    def met(self, judged: bool) -> str | None:
        """`goal`, `must beat` or `neither`; None where there is nothing to judge."""
        if self.target is None or not judged:
            return None
        value = self.ratio if self.target.of == "ratio" else self.sides.get(self.ours)
        if value is None:
            return None
        sign = 1 if self.better == "higher" else -1
        if sign * value >= sign * self.target.goal:
            return "goal"
        return "must beat" if sign * value > sign * self.target.must_beat else "neither"

    def as_json(self, case: str, judged: bool) -> dict[str, Any]:
        """The row of a file of results."""
        return {
            "case": case,
            "what": self.what,
            "unit": self.unit,
            "better": self.better,
            "ours": self.ours,
            "rival": self.rival,
            "sides": dict(self.sides),
            "modes": dict(self.modes),
            "errors": dict(self.errors),
            "ratio": self.ratio,
            "must_beat": self.target and self.target.must_beat,
            "goal": self.target and self.target.goal,
            "goal_of": self.target and self.target.of,
            "met": self.met(judged),
            "floors": dict(self.floors),
            "fraction_of_floor": self.fraction_of_floor,
        }


class SkippedError(Exception):
    """Raised by a case that cannot be run here, with the reason."""


Rows = Callable[[Setting], Iterator[Row]]


class Case(NamedTuple):
    """A named comparison."""

    name: str
    family: str
    rows: Rows

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.rows.__doc__ or "").strip().splitlines()[0]


CASES: dict[str, Case] = {}
FILES = ("networks", "start_up", "modules")  # that register cases, in the order in which these are run


def case(name: str, family: str) -> Callable[[Rows], Rows]:
    """Register a case; those of one family are run one after the other and share what they compile."""

    def register(rows: Rows) -> Rows:
        CASES[name] = Case(name, family, rows)
        return rows

    return register


def load_cases() -> dict[str, Case]:
    """All cases by name, in their order."""
    for file in FILES:
        importlib.import_module(file)
    return dict(sorted(CASES.items(), key=lambda item: FILES.index(item[1].rows.__module__)))
