"""The code of docs/explain.md works, and says what it says."""

import re
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "explain.md").read_text(), re.DOTALL)
    exec(compile(block, "explain.md", "exec"), {})
    place, error = capsys.readouterr().out.splitlines()
    assert f"# {place}" in block
    assert float(error) < 1e-10


def test_the_picture_is_there_and_small():
    picture = DOCS / "explain.png"
    assert Image.open(picture).width > 1000
    assert picture.stat().st_size < 300_000
