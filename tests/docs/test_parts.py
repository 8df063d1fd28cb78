"""The parts of the pages that are made when the site is built say what the package and the results say."""

import importlib

import pytest
from documents import ROOT
from result_files import RUN, write


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.setattr(
        "gsanet.paper.tables.count", lambda network: (1_000_000, 2_000_000_000)
    )  # counting takes a while
    return importlib.import_module("parts")


def test_results_without_runs(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = parts.results()
    assert "no finished run" in text
    assert "| ResNet-38, GSA | `gsa_resnet38` | (+1.9) 77.8 | \u2013 | 1.000 | 14.2 |" in text


def test_results_with_runs(parts, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    write(tmp_path / "results", a=RUN, b={**RUN, "run": "again", "seed": 1, "top1": 50.73, "top5": 75.0})
    monkeypatch.chdir(tmp_path)
    text = parts.results()
    row = "| ResNet-38, GSA | `gsa_resnet38` | (+1.9) 77.8 | 50.23 ± 0.71 (tinyimagenet, 2 runs) | 1.000 | 14.2 |"
    assert row in text
    assert "| `again` | `gsa_resnet38` | tinyimagenet | `tinyimagenet` | 1 | 50.73 | 75.00 | `abc1234` |" in text


def test_costs_are_those_of_the_equations(parts):
    """Of d channels in eight heads on N = s x s pixels, a multiplication and an addition being two."""
    d, s = 64, 56
    n = s * s
    assert list(parts.operations(d, s).values()) == [
        2 * n * 9 * d * d,
        2 * n * 3 * d * d,
        2 * 2 * n * d * d // 8,
        2 * 2 * n * s * d,
        2 * 2 * n * s * d,
        2 * 2 * n * n * d,
    ]


def test_formulas_become_mathml(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    pytest.importorskip("pymdownx")  # comes with the site's builder, which needs Python 3.11
    markdown = importlib.import_module("markdown")
    extensions = ["pymdownx.arithmatex", "mathml"]
    options = {"pymdownx.arithmatex": {"generic": True}}
    html = markdown.markdown("$a < b_1$ and\n\n$$ \\sum_i x_i $$", extensions=extensions, extension_configs=options)
    assert html.count("<math") == 2
    assert "<mi>a</mi><mo>&lt;</mo><msub>" in html.replace("&#x0003C;", "&lt;")
    assert 'display="block"' in html
    assert "arithmatex" not in html
