"""Tables 2 to 6 of the paper, again: each row as printed, counted, and measured."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gsanet.models import count_flops, count_parameters, create_model, list_models
from gsanet.paper.notes import NOTES
from gsanet.paper.printed import Network, PrintedRow, printed_table
from gsanet.paper.results import Results, Run, without_seed


@dataclass(frozen=True)
class Measured:
    """Runs that differ only in their seed: how many, and the mean of their accuracies."""

    dataset: str
    recipe: str
    training: str
    length: str
    network: str
    runs: int
    top1: float
    top1_spread: float | None
    top5: float | None
    images_per_second: float | None
    commands: list[str]

    @property
    def setting(self) -> tuple[str, str, str]:
        """What two rows must have in common to be compared: data set, recipe with what was set over it, and length."""
        return self.dataset, self.training, self.length

    @property
    def column(self) -> str:
        """The column of the paper's tables that it stands beside."""
        return "cifar100_top1" if is_cifar100(self.dataset) else "top1"


@dataclass(frozen=True)
class MeasuredRuntime:
    """The time of one image, and where it was taken."""

    milliseconds: float
    where: str


@dataclass(frozen=True)
class TableRow:
    """One row of a table.

    Args:
        key: How a file of results names the row.
        name: The row in the paper's words.
        network: The network here, with its options.
        printed: What the paper prints, by column.
        params: Counted at 224x224 with 1000 classes; None if there is no such network here.
        flops: The same.
        params_match: Whether the count, rounded as the paper rounds, is the printed one; None where nothing is printed.
        flops_match: The same.
        measured: Accuracies by runs in the folder of results.
        runtimes: Of one image, by `gsanet bench`.
        note: Why a count is not the printed one.
    """

    key: str
    name: str
    network: str
    printed: dict[str, str]
    params: int | None
    flops: int | None
    params_match: bool | None
    flops_match: bool | None
    measured: list[Measured]
    runtimes: list[MeasuredRuntime]
    note: str

    @property
    def exists(self) -> bool:
        """Whether the network is one of this package's."""
        return self.params is not None


def table_rows(number: int, results: Results) -> Iterator[TableRow]:
    """The rows of Table 2, 3, 4, 5 or 6, one after the other: counting takes a moment each."""
    for row in printed_table(number).rows:
        counts = count(row.network)
        matches: tuple[bool | None, bool | None] = (None, None)
        if counts is not None:
            matches = (_match(counts[0] / 1e6, row, "params"), _match(counts[1] / 1e9, row, "flops"))
        yield TableRow(
            key=row.key,
            name=row.name,
            network=str(row.network),
            printed=row.cells,
            params=counts[0] if counts else None,
            flops=counts[1] if counts else None,
            params_match=matches[0],
            flops_match=matches[1],
            measured=[summarise(runs) for runs in alike(_printed_beside(results.runs_of(row), row)).values()],
            runtimes=[
                MeasuredRuntime(found.milliseconds, f"{found.device}, {found.dtype}, {found.img_size}")
                for found in results.latencies_of(row)
            ],
            note=NOTES.get(row.network.model, "") if False in matches else "",
        )


@cache
def count(network: Network) -> tuple[int, int] | None:
    """Parameters and operations, or None if the network does not exist."""
    if network.model not in list_models():
        return None
    with torch.device("meta"):
        model = create_model(network.model, **network.kwargs)
    return count_parameters(model), count_flops(model)


def _match(counted: float, row: PrintedRow, column: str) -> bool | None:
    printed = row.number(column)
    return None if printed is None else f"{counted:.1f}" == f"{printed:.1f}"


def is_cifar100(dataset: str) -> bool:
    """Whether it is the data set of the paper's appendix."""
    return dataset.lower().replace("-", "") == "cifar100"


def _printed_beside(runs: list[Run], row: PrintedRow) -> list[Run]:
    """Only Table 6 has a column for CIFAR-100."""
    return [run for run in runs if "cifar100_top1" in row.cells or not is_cifar100(run.dataset)]


def alike(runs: list[Run]) -> dict[Any, list[Run]]:
    """Runs by what was trained on what: only their seeds differ."""
    groups: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.dataset, run.training, run.length, run.network].append(run)
    return groups


def measured_run(results: Results, name: str) -> Measured | None:
    """A run of the matrix, all its seeds as one; None if there is none."""
    runs = [run for run in results.runs if without_seed(run.run) == name]
    return summarise(runs) if runs else None


def summarise(runs: list[Run]) -> Measured:
    """Runs that differ only in their seed, as one."""

    def mean(name: str) -> float | None:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        return statistics.fmean(values) if values else None

    accuracies = [run.top1 for run in runs]
    return Measured(
        dataset=runs[0].dataset,
        recipe=runs[0].recipe,
        training=runs[0].training,
        length=runs[0].length,
        network=str(runs[0].network),
        runs=len(runs),
        top1=statistics.fmean(accuracies),
        top1_spread=statistics.stdev(accuracies) if len(runs) > 1 else None,
        top5=mean("top5"),
        images_per_second=mean("images_per_second"),
        commands=[run.command for run in runs],
    )
