import io

import pytest
from result_files import BENCH, RUN, write
from rich.console import Console

from gsanet.paper import tables
from gsanet.paper.printed import printed_table, printed_tables
from gsanet.paper.results import Results, read_results
from gsanet.paper.show import show_table
from gsanet.paper.tables import table_rows


def text_of(number, rows, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    for part in show_table(printed_table(number), rows):
        console.print(part, highlight=False)
    return console.export_text()


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_every_printed_cell_is_shown_at_80_columns(number):
    rows = list(table_rows(number, Results()))
    text = text_of(number, rows)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    lines = text.splitlines()
    for row in printed_table(number).rows:
        numbers = [cell for name, cell in row.cells.items() if name.startswith(("top", "cifar", "par", "flo", "run"))]
        assert any(all(cell in line for cell in numbers) for line in lines), row
    assert "not measured here yet" in text


def test_sizes_are_the_printed_ones_or_explained():
    for number in (2, 3, 6):
        for row in table_rows(number, Results()):
            assert (False in (row.params_match, row.flops_match)) == bool(row.note), row.network


def test_a_network_that_does_not_exist_has_a_plain_mark(monkeypatch):
    monkeypatch.setattr(tables, "list_models", lambda: ["gsa_resnet50"])
    tables.count.cache_clear()
    rows = list(table_rows(2, Results()))
    tables.count.cache_clear()
    assert [row.exists for row in rows] == [True, False, True]
    assert "axial_resnet50 (not here yet)" in text_of(2, rows)


def test_measured_beside_printed(tmp_path):
    files = {
        "a": RUN,
        "b": {**RUN, "seed": 1, "top1": 49.11},
        "c": {**RUN, "dataset": "cifar100", "top1": 71.2},
        "bench": BENCH,
    }
    rows = {row.name: row for row in table_rows(6, read_results(write(tmp_path, **files)))}
    tiny, cifar = rows["ResNet-38, GSA"].measured
    assert (tiny.runs, tiny.top1, cifar.runs) == (2, pytest.approx(49.42), 1)
    assert tiny.top1_spread == pytest.approx(0.438, abs=1e-3)
    assert rows["ResNet-38, GSA"].runtimes[0].milliseconds == 3.25
    assert not rows["ResNet-50, GSA"].measured
    text = text_of(6, list(rows.values()))
    for word in ("49.42", "71.20", "3.2 ms", "Measured on cifar100, recipe tinyimagenet", "standard deviation"):
        assert word in text
    files["d"] = {**RUN, "model": "gsa_resnet26", "rows": ["table6: ResNet-50, GSA"]}
    text = text_of(6, list(table_rows(6, read_results(write(tmp_path, **files)))))
    assert "Measured on tinyimagenet with gsa_resnet26, recipe tinyimagenet" in text


def test_cifar100_stands_only_where_the_paper_prints_it(tmp_path):
    results = read_results(write(tmp_path, a={**RUN, "model": "gsa_resnet50", "dataset": "cifar100"}))
    assert not any(row.measured for row in table_rows(4, results))
    assert any(row.measured for row in table_rows(6, results))


def test_all_rows_are_there():
    assert sum(len(table.rows) for table in printed_tables().values()) == 13 + 3 + 13 + 7 + 6 + 6
