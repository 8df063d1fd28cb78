"""The paper's tables in printed.json against the LaTeX that prints them, cell by cell."""

import re
from pathlib import Path

import pytest

from gsanet.paper.printed import CHECK, Network, printed_table, printed_tables

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "gsa-paper.tex"
needs_paper = pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")

CELL = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # an argument, with at most one pair of braces inside


def latex_tables(text):
    """Caption, headings and rows of each tabular environment, in order."""
    cited = citations(text)
    found = re.findall(r"\\caption" + CELL + r"\s*\\label\{(tab:[^}]*)\}\s*\\begin\{tabular\}", text)
    bodies = re.findall(r"\\begin\{tabular\}" + CELL + r"(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert len(found) == len(bodies) == text.count(r"\begin{tabular}")
    for (caption, label), (columns, body) in zip(found, bodies, strict=True):
        width = len(re.sub(r"p\{[^}]*\}", "p", columns))
        head, *groups = re.split(r"\\midrule", body)
        yield {
            "label": label,
            "caption": plain(caption, cited),
            "headings": headings(grid(head, cited), width),
            "rows": fill_down(grid(" ".join(groups), cited), width),
        }


def citations(text):
    """What \\citet prints for each key of the bibliography."""
    entries = re.findall(r"\\bibitem\[(.*?)\]\{(.*?)\}", text, re.DOTALL)
    return {key: re.match(r"(.*?)\((\d{4})\)", name.replace("~", " "), re.DOTALL).groups() for name, key in entries}


def plain(cell, cited):
    cell = re.sub(r"\\citet\{(.*?)\}", lambda match: "{} ({})".format(*cited[match[1]]), cell)
    cell = cell.replace(r"\checkmark", CHECK).replace(r"\xmark", "").replace(r"$3\times 3$", "3x3")
    cell = re.sub(r"\\textbf" + CELL, r"\1", cell)
    assert "\\" not in cell, cell
    return " ".join(cell.split())


def grid(body, cited):
    """Rows of (text, columns spanned, rows spanned)."""
    body = re.sub(r"\\(toprule|bottomrule|addlinespace)|\\cmidrule(\(\w+\))?\{[^}]*\}", "", body)
    rows = []
    for line in body.split(r"\\"):
        if not line.strip():
            continue
        row = []
        for cell in line.split("&"):
            across = re.match(r"\s*\\multicolumn\{(\d)\}\{\w\}" + CELL, cell)
            down = re.match(r"\s*\\multirow\{(\d)\}\{\w+\}" + CELL, cell)
            text = (across or down)[2] if across or down else cell
            row.append((plain(text, cited), int(across[1]) if across else 1, int(down[1]) if down else 1))
        rows.append(row)
    return rows


def spread(row, width, fill):
    """One text a column: a cell that spans several stands in the first, or in all of them."""
    texts = []
    for text, across, _ in row:
        texts += [text] * across if fill else [text, *[""] * (across - 1)]
    return texts + [""] * (width - len(texts))


def headings(rows, width):
    upper, lower = ([[]] if len(rows) == 1 else []) + rows
    over = spread(upper, width, fill=True)[:width]
    under = spread(lower, width, fill=False)[:width]
    return [f"{group}: {name}" if group else name for group, name in zip(over, under, strict=True) if name]


def fill_down(rows, width):
    """Blank cells that continue the one above: in a column with \\multirow, and below a structure's name.

    The \\multirow of Table 1's last group says four rows, and five follow: the next rule ends it, not the number.
    """
    continued = {column for row in rows for column, (_, _, down) in enumerate(row) if down > 1}
    if rows[0][0][0].startswith("ResNet"):
        continued.add(0)
    out = []
    for row in rows:
        texts = spread(row, width, fill=False)
        for column in continued:
            texts[column] = texts[column] or out[-1][column]
        out.append(texts)
    return out


@needs_paper
def test_every_cell_is_the_papers():
    tables = list(latex_tables(PAPER.read_text()))
    order = ["model_comparisons", "vs-axial", "vs-sota", "subcomponents", "groups", "vs-conv"]
    assert [table["label"] for table in tables] == [f"tab:{label}" for label in order]
    for number, table in enumerate(tables, start=1):
        ours = printed_table(number)
        assert ours.caption == table["caption"]
        assert list(ours.columns.values()) == table["headings"]
        width = len(ours.columns)
        assert all(not any(row[width:]) for row in table["rows"])  # Tables 5 and 6 declare columns that stay empty
        assert [list(row.cells.values()) for row in ours.rows] == [row[:width] for row in table["rows"]]


@needs_paper
def test_a_changed_digit_is_noticed():
    text = PAPER.read_text()
    local = r"\checkmark & \checkmark & \multirow{4}"
    changes = [
        (rf"\xmark & {local}", rf"\checkmark & {local}"),
        ("32.5 ms", "32.6 ms"),
        ("131.9 ms", "131.8 ms"),
        ("70.2", "70.1"),
        ("23.2 ms", "23.3 ms"),
        ("(+0.9)", "(+0.8)"),
    ]
    for number, (old, new) in enumerate(changes, start=1):
        assert text.count(old) == 1
        tables = list(latex_tables(text.replace(old, new)))
        cells = [list(row.cells.values()) for row in printed_table(number).rows]
        assert cells != [row[: len(cells[0])] for row in tables[number - 1]["rows"]]


def test_every_row_has_a_name_and_a_network_of_its_own():
    for table in printed_tables().values():
        assert len({row.key for row in table.rows}) == len(table.rows)
        assert len({row.network for row in table.rows}) == len(table.rows)


def test_networks_of_rows():
    networks = {row.key: row.network for table in printed_tables().values() for row in table.rows}
    assert networks["table1: Zhao et al. (2020)"] == Network("san19_patchwise")
    assert networks["table3: ResNet-101, Bello et al. (2019)"] == Network("aa_resnet101")
    assert networks["table3: M-ResNet-50, This work"] == Network("gsa_m_resnet50")
    assert networks["table4: Col., Row"].kwargs == {"content": False}
    assert networks["table4: Content"].kwargs == {"column": False, "row": False}
    assert networks["table5: groups 3, 4"].kwargs == {"groups": (3, 4)}
    assert networks["table5: ResNet-101 CNN"] == Network("conv_resnet101")
    assert networks["table4: Content, Col., Row"] == networks["table5: groups 1, 2, 3, 4"] == Network("gsa_resnet50")


def test_numbers_of_cells():
    row = next(row for row in printed_table(6).rows if row.name == "ResNet-38, GSA")
    assert row.number("top1") == 77.8
    assert row.number("params") == 14.2
    assert row.number("runtime") == 24.7
    assert row.number("memory") is None
    assert printed_table(3).rows[0].number("flops") is None
