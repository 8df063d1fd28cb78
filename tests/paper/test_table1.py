import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from gsanet.layers.attention import Combination
from gsanet.models import list_models
from gsanet.paper import table1 as module
from gsanet.paper.placement import placement
from gsanet.paper.printed import printed_table
from gsanet.paper.show import show_table1
from gsanet.paper.table1 import measure, networks, table1


@pytest.fixture(scope="module")
def rows():
    return {row.network: row for row in table1()}


def text_of(rows, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    for part in show_table1(printed_table(1), list(rows)):
        console.print(part, highlight=False)
    return console.export_text()


def test_every_system_is_measured_and_every_difference_explained(rows):
    assert set(rows) <= set(list_models())
    assert len(rows) == 14  # thirteen systems, one of them with two kinds of attention
    assert {name: list(row.differences) for name, row in rows.items() if row.differences} == {
        "ccnet_resnet50": ["positional"]
    }
    assert all("not explained" not in why for row in rows.values() for why in row.differences.values())


def test_what_the_modules_say_of_themselves_is_what_is_measured(rows):
    for name, row in rows.items():
        properties = module.attention_of(name).properties
        claims = (properties.everywhere, properties.content, properties.positional, properties.combination.value)
        assert tuple(row.measured.values()) == claims, name


def test_the_page_on_the_rivals_has_them_all(rows):
    page = (Path(__file__).parents[2] / "docs" / "rivals.md").read_text()
    for name in rows:
        assert f"`{name}`" in page
    for name in re.findall(r"`(\w+_resnet\d+|san19_\w+|axial_deeplab_\w)`", page):
        assert name in list_models()


def test_what_commutes(rows):
    kinds = {name: row.commutes_with for name, row in rows.items()}
    for name in ("nonlocal_resnet50", "a2_resnet50", "cgnl_resnet50", "ea_resnet50"):
        assert kinds[name] == ["shuffling"]
    assert kinds["ccnet_resnet50"] == ["lines", "moves"]
    for name in ("gsa_resnet50", "sasa_resnet50", "lr_resnet50", "san19_pairwise", "san19_patchwise"):
        assert kinds[name] == ["moves"]
    for name in ("detr_resnet50", "videobert_resnet50", "aa_resnet50", "axial_deeplab_s"):
        assert kinds[name] == []


def test_shown_at_80_columns(rows):
    text = text_of(rows.values())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "13 of 14 measured rows have the paper's marks" in text
    assert "ccnet_resnet50, positional" in text


def test_a_network_that_does_not_exist_has_a_plain_mark(monkeypatch):
    monkeypatch.setattr(module, "list_models", lambda: [])
    row = measure(*networks()[0])
    assert row.measured is None
    assert "nonlocal_resnet50 (not" in text_of([row])


def test_measuring_leaves_the_random_state_alone():
    import torch

    state = torch.random.get_rng_state()
    measure(*networks()[0])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "combination", "numbers"),
    [
        ("conv_resnet50", Combination.AT_THE_END, (0, 16, 16, 0, 16)),  # no attention: nothing runs after it
        ("gsa_resnet50", Combination.REPLACES, (16, 0, 16, 0, 0)),
        ("axial_resnet50", Combination.REPLACES, (16, 0, 16, 0, 0)),
        ("nonlocal_resnet50", Combination.INSERTED, (5, 16, 16, 0, 5)),
        ("videobert_resnet50", Combination.AT_THE_END, (1, 16, 16, 0, 16)),
        ("aa_resnet50", Combination.IN_PARALLEL, (13, 3, 16, 13, 3)),
    ],
)
def test_placement(name, combination, numbers):
    found = placement(name, "conv_resnet50")
    assert found.combination == combination
    assert (found.attention, found.convolutions, found.twin_convolutions, found.parallel, found.before) == numbers
