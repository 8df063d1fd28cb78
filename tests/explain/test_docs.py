"""The code of docs/explain.md works, and says what it says."""

from documents import ROOT, blocks
from PIL import Image


def test_the_example(capsys):
    (block,) = blocks("docs/explain.md", "python")
    exec(compile(block, "explain.md", "exec"), {})
    place, error = capsys.readouterr().out.splitlines()
    assert f"# {place}" in block
    assert float(error) < 1e-10


def test_the_picture_is_there_and_small():
    picture = ROOT / "docs" / "explain.png"
    assert Image.open(picture).width > 1000
    assert picture.stat().st_size < 800_000
