"""Rows against rows: the paper's differences beside those measured here, and whether its order holds.

Accuracies on other data are no check of the paper's; differences between networks that were trained alike may be.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gsanet.paper.printed import printed_table
from gsanet.paper.results import Results
from gsanet.paper.tables import Measured, TableRow, alike, summarise

Setting = tuple[str, str, str]


@dataclass(frozen=True)
class Difference:
    """One row less another, in points of top-1.

    Args:
        row: Its name.
        against: The other's.
        paper: As the paper prints them.
        here: The means over seeds, measured here.
        noise: The standard error of `here`, from the spread over seeds at this setting; None if it is not known.
    """

    row: str
    against: str
    paper: float
    here: float
    noise: float | None

    @property
    def agrees(self) -> bool:
        """Whether it has the paper's sign."""
        return self.paper * self.here > 0

    @property
    def is_within_noise(self) -> bool:
        """Whether it is too small to have a sign: less than two standard errors."""
        return self.noise is not None and abs(self.here) < 2 * self.noise


@dataclass(frozen=True)
class Compared:
    """The rows of a table at one setting: each against the one it is meant to be compared with, and all pairs.

    A pair that the paper prints as equal has no order, and is left out.
    """

    differences: list[Difference]
    pairs: list[Difference]


def compare(table: int, rows: Sequence[TableRow], spreads: Mapping[Setting, float]) -> dict[Setting, Compared]:
    """The comparisons of a table, for each setting (data set, training, length) that at least two rows have runs of.

    Args:
        table: Its number.
        rows: As `table_rows` gives them.
        spreads: The standard deviation over seeds at each setting, as `seed_spreads` gives it.
    """
    compared = {}
    for setting in dict.fromkeys(found.setting for row in rows for found in row.measured):
        measured = {row.name: found for row in rows for found in row.measured if found.setting == setting}
        if len(measured) < 2:
            continue
        subtract = partial(_difference, table, measured, spreads.get(setting))
        baselines = {name: _baseline(table, name) for name in measured}
        meant = [subtract(name, other) for name, other in baselines.items() if other in measured and other != name]
        pairs = [subtract(name, other) for name, other in itertools.combinations(measured, 2)]
        compared[setting] = Compared([each for each in meant if each], [each for each in pairs if each and each.paper])
    return compared


def seed_spreads(results: Results) -> dict[Setting, float]:
    """The standard deviation of top-1 over seeds at each setting, from all networks that have several."""
    found: dict[Setting, list[tuple[float, int]]] = defaultdict(list)
    for runs in alike([run for run in results.runs if not run.holdout]).values():
        if len(runs) > 1:
            variance = statistics.variance([run.top1 for run in runs])
            found[summarise(runs).setting].append((variance, len(runs) - 1))
    return {
        setting: math.sqrt(sum(variance * weight for variance, weight in known) / sum(weight for _, weight in known))
        for setting, known in found.items()
    }


def _difference(
    table: int, measured: Mapping[str, Measured], spread: float | None, name: str, other: str
) -> Difference | None:
    """One row less another; None where the paper does not print both."""
    one, two = measured[name], measured[other]
    printed = {row.name: row.number(one.column) for row in printed_table(table).rows}
    (first, second) = printed[name], printed[other]
    if first is None or second is None:
        return None
    noise = None if spread is None else spread * math.sqrt(1 / one.runs + 1 / two.runs)
    return Difference(name, other, round(first - second, 4), one.top1 - two.top1, noise)


def _baseline(table: int, name: str) -> str:
    """The row that another is meant to be compared with: the CNN in Table 6, the proposed network elsewhere."""
    if table == 6:
        return name.replace("GSA", "Convolution")
    if table == 3:
        return f"{name.partition(', ')[0]}, This work"
    return printed_table(table).rows[0].name
