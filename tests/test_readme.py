"""What the README shows works, and what it says is counted."""

import re
import runpy
import sys

import pytest
from documents import PAGES, ROOT

from gsanet.paper.structure import structure

README = PAGES["README.md"].read_text()
DOCS = ROOT / "docs"


def test_structure_table_is_what_is_counted():
    for row in structure():
        line = next(line for line in README.splitlines() if line.startswith(f"| {row.network} |"))
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        assert cells[2:] == [
            f"{row.params / 1e6:.3f}",
            row.printed_params_m,
            f"{row.flops / 1e9:.3f}",
            row.printed_flops_g,
        ]


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("script", sorted(script.name for script in DOCS.glob("draw_*.py")))
def test_pictures_are_what_the_scripts_draw(script, tmp_path, monkeypatch):
    name = script.removeprefix("draw_").replace(".py", ".svg")
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / name)])
    runpy.run_path(str(DOCS / script), run_name="__main__")
    assert (tmp_path / name).read_text().count("<path") > 50
    assert (DOCS / name).exists()
