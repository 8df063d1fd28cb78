import pytest

from gsanet.models import count_flops, count_parameters, create_model
from gsanet.paper import m_resnet50
from gsanet.paper.structure import ROWS, structure


@pytest.fixture(scope="module")
def rows():
    return {row.network: row for row in structure()}


def test_all_match_but_the_one_that_is_explained(rows):
    assert set(rows) == set(ROWS)
    assert [name for name, row in rows.items() if not row.matches] == ["M-ResNet-50, GSA"]
    assert "No reading" in rows["M-ResNet-50, GSA"].note


def test_match_is_judged_as_the_paper_rounds(rows):
    from dataclasses import replace

    row = rows["ResNet-50, GSA"]
    assert row.params_match
    assert not replace(row, params=row.params + 100_000).params_match
    assert not replace(row, printed_flops_g="7.1").matches


def test_search_counts_as_the_counter_does():
    """The closed form of the search against the real networks, and its result."""
    for name, widths in {
        "gsa_m_resnet50": ((72, 144, 288, 576), (144, 288, 576, 1152)),
        "gsa_resnet50": ((64, 128, 256, 512), (256, 512, 1024, 2048)),
    }.items():
        model = create_model(name)
        inner, outer = widths
        assert m_resnet50.count(inner, outer, inner, 64) == (count_parameters(model), count_flops(model))
    readings = list(m_resnet50.readings())
    assert len(set(readings)) == len(readings) == 1984
    assert f"{len(readings):,} were counted" in m_resnet50.NOTE
    for reading in readings:
        params, flops = m_resnet50.count(*reading)
        assert (round(params / 1e6, 1), round(flops / 1e9, 1)) != (12.7, 6.0)
