"""What a run says: lines and tables on the screen, Markdown for the README, and a file of results.

A file of results is a JSON object: `environment`, `dtype`, `setting`, `rows` and `skipped` (reasons, by case). A row
has `case`, `what`, `unit`, `better` (`higher` or `lower`), `sides` (values by name), `ours` (the name of our side) and
`rival` (that of the best other), `modes` and `errors` (by side), `ratio` (ours over the rival's), `must_beat`, `goal`
and `goal_of` (what of the row these are held against: its `ratio`, or our own `value`), `met` (`goal`, `must beat`,
`neither`, or null where nothing is judged), `floors` and `fraction_of_floor`.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from registry import load_cases
from rich.table import Table

KEYS = ("environment", "dtype", "setting", "rows", "skipped")
ROW_KEYS = (
    *("case", "what", "unit", "better", "ours", "rival", "sides", "modes", "errors", "ratio"),
    *("must_beat", "goal", "goal_of", "met", "floors", "fraction_of_floor"),
)


class Report:
    """The rows of a run, written to a file after each, so that a run that is cut loses nothing.

    Args:
        environment: Machine, versions and commit.
        setting: As `Setting.as_json` gives it.
        file: Where to; None for nowhere. Rows of other cases that are in it stay, if they were made in the same
            environment and setting, so that the cases can be run in several goes.
    """

    def __init__(self, environment: dict[str, str], setting: dict[str, Any], file: Path | None = None):
        self.environment, self.setting, self.file = environment, setting, file
        self.rows: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}
        self.dropped = False  # whether rows in the file were of another environment or setting
        if file is not None and file.exists():
            found = read_report(file)
            if (found["environment"], found["setting"]) == (environment, setting):
                self.rows, self.skipped = found["rows"], found["skipped"]
            else:
                self.dropped = True

    def begin(self, case: str) -> None:
        """Forget what was known of a case that is run again."""
        self.rows = [row for row in self.rows if row["case"] != case]
        self.skipped.pop(case, None)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, and write the file."""
        self.rows.append(row)
        self.write()

    def skip(self, case: str, reason: str) -> None:
        """Note why a case was not run, and write the file."""
        self.skipped[case] = reason
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(self.file.name + ".part")
        unfinished.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, self.file)

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        order = list(load_cases())
        rows = sorted(self.rows, key=lambda row: order.index(row["case"]))
        values = (self.environment, self.setting["dtype"], self.setting, rows, self.skipped)
        return dict(zip(KEYS, values, strict=True))


def read_report(file: Path) -> dict[str, Any]:
    """A file of results; one that is not as described above is refused by name."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or set(content) != set(KEYS):
        raise ValueError(f"{file}: must be an object of {', '.join(KEYS)}")
    for row in content["rows"]:
        if set(row) != set(ROW_KEYS):
            raise ValueError(f"{file}: a row must have {', '.join(ROW_KEYS)}, got {', '.join(row)}")
        if row["case"] not in load_cases():
            raise ValueError(f"{file}: there is no case {row['case']!r}")
    return content


def default_file(environment: dict[str, str]) -> Path:
    """`results/benchmarks/speed-<device>.json`."""
    words = "".join(c if c.isalnum() else " " for c in environment["device"].lower().removeprefix("nvidia ")).split()
    return Path(__file__).parents[1] / "results" / "benchmarks" / f"speed-{'-'.join(words)}.json"


def number(value: float | None, unit: str = "") -> str:
    """Three digits that matter, or all before the point."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def ratio_text(row: dict[str, Any]) -> str:
    """The ratio to two places, as people say it."""
    return "-" if row["ratio"] is None else f"{row['ratio']:.2f}"


def row_line(row: dict[str, Any]) -> str:
    """A row in one line."""
    parts = []
    for side, value in row["sides"].items():
        mode = row["modes"].get(side)
        parts.append(f"{side} {number(value, row['unit'])}{f' ({mode})' if mode else ''}")
    if row["ratio"] is not None:
        parts.append(f"ratio {ratio_text(row)}")
    if row["fraction_of_floor"] is not None:
        parts.append(f"{row['fraction_of_floor']:.0%} of the byte floor's speed")
    if row["met"]:
        parts.append(f"meets {row['met']}")
    parts += [f"{side} FAILED: {error}" for side, error in row["errors"].items()]
    return f"{row['what']}: {'; '.join(parts)}"


class Cells(NamedTuple):
    """A table, before it is drawn on a screen or written as Markdown."""

    title: str
    head: list[str]
    lines: list[list[str]]


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[Cells]:
    """The rows that have goals in one table, and one table for each other case."""
    if targets := [row for row in rows if row["goal"] is not None]:
        lines = [_target_line(row) for row in targets]
        yield Cells("Goals", ["Row", "Measured", "Ratio", "Must beat", "Goal"], lines)
    others = (row for row in rows if row["goal"] is None)
    for case, group in groupby(others, key=lambda row: row["case"]):
        yield _plain_table(case, list(group))


def _target_line(row: dict[str, Any]) -> list[str]:
    sides = ", ".join(f"{side} {number(value, row['unit'])}" for side, value in row["sides"].items())
    sign = "≥" if row["better"] == "higher" else "≤"
    goal, bound = f"{sign} {row['goal']:g}", f"{row['must_beat']:g}"
    if row["goal_of"] == "value":
        goal, bound = f"{goal} {row['unit']}", f"{bound} {row['unit']}"
    if row["met"]:
        goal += " ✓" if row["met"] == "goal" else " ✗"
        bound += " ✗" if row["met"] == "neither" else " ✓"
    return [row["what"], sides or "failed", ratio_text(row), bound, goal]


def _plain_table(case: str, rows: list[dict[str, Any]]) -> Cells:
    names = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    floors = list(dict.fromkeys(floor for row in rows for floor in row["floors"]))
    ratios = any(row["ratio"] is not None for row in rows)
    units = list(dict.fromkeys(row["unit"] for row in rows))
    head = ["Row", *names, *(f"floor, {floor}" for floor in floors)]
    head += ["of byte floor"] * bool(floors) + ["ratio to best"] * ratios
    lines = []
    for row in rows:
        line = [row["what"] if len(units) == 1 else f"{row['what']} ({row['unit']})"]
        line += [number(row["sides"].get(name)) for name in names]
        line += [number(row["floors"].get(floor)) for floor in floors]
        if floors:
            line.append("-" if row["fraction_of_floor"] is None else f"{row['fraction_of_floor']:.0%}")
        if ratios:
            line.append(ratio_text(row))
        lines.append(line)
    unit = f" ({units[0]})" if len(units) == 1 else ""
    return Cells(f"{case}{unit}: {load_cases()[case].summary}", head, lines)


def losses(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The rows in which another side is better than ours."""
    lost = []
    for row in rows:
        if row["ratio"] is not None and (row["ratio"] < 1 if row["better"] == "higher" else row["ratio"] > 1):
            lost.append(f"{row['case']}, {row['what']}: {row['rival']}, ours / theirs {ratio_text(row)}")
    return lost


def rich_table(cells: Cells) -> Table:
    """For the screen."""
    table = Table(title=cells.title, title_justify="left")
    for number_of_column, heading in enumerate(cells.head):
        table.add_column(heading, justify="left" if number_of_column == 0 or heading == "Measured" else "right")
    for line in cells.lines:
        table.add_row(*line)
    return table


def markdown(report: dict[str, Any]) -> str:
    """Everything, for the README."""
    facts, setting = report["environment"], report["setting"]
    parts = [f"Measured on {', '.join(f'{name} {value}' for name, value in facts.items())}, {setting['dtype']}."]
    for cells in tables(report["rows"]):
        right = ["---:" if heading not in ("Row", "Measured") else "---" for heading in cells.head]
        lines = [cells.head, right, *cells.lines]
        parts += [f"**{cells.title}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    if lost := losses(report["rows"]):
        parts.append("Where another side is better:\n\n" + "\n".join(f"- {line}" for line in lost))
    if report["skipped"]:
        parts.append("\n".join(f"- not run, {case}: {reason}" for case, reason in report["skipped"].items()))
    return "\n\n".join(parts) + "\n"
