"""The paper's six tables as it prints them, and the network of this package that each row is.

`printed.json` holds every cell as a string, without its bold face. A cell that the paper leaves blank because it
continues the one above is filled in.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from gsanet.models.registry import as_typed

CHECK = "✓"
NOTHING = ("", "-")  # what the paper prints where it has no number


@dataclass(frozen=True)
class Network:
    """A network by its name and the options that make it different from others of that name."""

    model: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def kwargs(self) -> dict[str, Any]:
        """The options as `create_model` takes them."""
        return dict(self.options)

    def __str__(self) -> str:
        return as_typed(self.model, self.kwargs)


@dataclass(frozen=True)
class PrintedRow:
    """One row of a table.

    Args:
        table: The table's number.
        name: What tells the row from the others, in the paper's words.
        network: What it is here.
        cells: The printed strings, by the names of the columns in `printed.json`.
    """

    table: int
    name: str
    network: Network
    cells: dict[str, str]

    @property
    def key(self) -> str:
        """How a file of results names this row, such as `table4: Content, Col.`."""
        return f"table{self.table}: {self.name}"

    def printed(self, column: str) -> str:
        """A cell, or nothing where the paper has no number or no such column."""
        text = self.cells.get(column, "")
        return "" if text in NOTHING else text

    def number(self, column: str) -> float | None:
        """A cell as a number: `(+1.9) 77.8` is 77.8, `18.1 M` is 18.1."""
        text = self.printed(column)
        return float(text.split(")")[-1].split()[0]) if text else None


@dataclass(frozen=True)
class PrintedTable:
    """One table: its caption, its columns' headings by name, and its rows."""

    number: int
    caption: str
    columns: dict[str, str]
    rows: list[PrintedRow]


METHODS = {
    "Wang et al. (2018)": "nonlocal",
    "Chen et al. (2018)": "a2",
    "Yue et al. (2018)": "cgnl",
    "Shen et al. (2018)": "ea",
    "Huang et al. (2019)": "ccnet",
    "Carion et al. (2020)": "detr",
    "Sun et al. (2019)": "videobert",
    "Bello et al. (2019)": "aa",
    "Hu et al. (2019)": "lr",
    "Ramachandran et al. (2019)": "sasa",
    "This work": "gsa",
}
SPECIAL = {
    "Zhao et al. (2020)": "san19_patchwise",  # Table 3 prints the patchwise one
    "Wang et al. (2020)": "axial_deeplab_s",
    "Wang et al. (2020) (conv-stem)": "axial_deeplab_s",
}
STRUCTURES = {
    "ResNet-38": "resnet38",
    "ResNet-50": "resnet50",
    "ResNet-101": "resnet101",
    "M-ResNet-50": "m_resnet50",
}
AXIAL = {
    "Proposed GSA module": Network("gsa_resnet50"),
    "Axial content and positional attention": Network("axial_resnet50"),
    "Only axial positional attention": Network("gsa_resnet50", (("content", False),)),
}


@cache
def printed_tables() -> dict[int, PrintedTable]:
    """All six, by number."""
    tables = {}
    data = json.loads(files("gsanet.paper").joinpath("printed.json").read_text(encoding="utf-8"))
    for number, table in data["tables"].items():
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        tables[int(number)] = PrintedTable(
            number=int(number),
            caption=table["caption"],
            columns=table["columns"],
            rows=[PrintedRow(int(number), *_identify(int(number), table["columns"], cells), cells) for cells in rows],
        )
    return tables


def printed_table(number: int) -> PrintedTable:
    """One of the paper's tables, by its number: 1 to 6."""
    return printed_tables()[number]


def _identify(table: int, columns: dict[str, str], cells: dict[str, str]) -> tuple[str, Network]:
    """A row's name, and its network."""
    if table == 1:
        method = cells["method"]
        return method, Network(SPECIAL.get(method) or f"{METHODS[method]}_resnet50")
    if table == 2:
        return cells["module"], AXIAL[cells["module"]]
    if table == 3:
        structure, method = cells["structure"], cells["method"]
        return f"{structure}, {method}", Network(SPECIAL.get(method) or f"{METHODS[method]}_{STRUCTURES[structure]}")
    if table == 6:
        prefix = {"Convolution": "conv", "GSA": "gsa"}[cells["operation"]]
        return f"{cells['structure']}, {cells['operation']}", Network(f"{prefix}_{STRUCTURES[cells['structure']]}")
    marks = {name: cell for name, cell in cells.items() if not name.startswith("top") and name != "runtime"}
    if (text := next(iter(marks.values()))) not in (CHECK, ""):  # a CNN beside the variants
        return text, Network(f"conv_{STRUCTURES[text.removesuffix(' CNN')]}")
    on = [name for name, cell in marks.items() if cell == CHECK]
    words = [columns[name].split(": ")[-1] for name in on]
    if table == 4:
        off = sorted(name for name in marks if name not in on)  # in the order in which runs are compared with rows
        return ", ".join(words), Network("gsa_resnet50", tuple((name, False) for name in off))
    groups = tuple(int(word) for word in words)
    return f"groups {', '.join(words)}", Network("gsa_resnet50", (("groups", groups),) if len(groups) < 4 else ())
