"""What the README shows works, and what it says is counted."""

import re
from pathlib import Path

import pytest

from gsanet.paper.structure import structure

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = {
    f"{page.name}-{number}": block
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}


@pytest.mark.parametrize("name", BLOCKS)
def test_code_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(BLOCKS[name], name, "exec"), {})


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


def test_figure_is_what_the_script_draws(tmp_path):
    import runpy
    import sys

    script = Path(__file__).parents[1] / "docs" / "draw_module.py"
    argv, sys.argv = sys.argv, [str(script), str(tmp_path / "module.svg")]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
    assert (tmp_path / "module.svg").read_text().count("<path") > 50
