"""Each click changes what it should, and what a browser may send changes nothing else."""

import base64
import io
import re

import gradio as gr
import numpy as np
import pytest
from PIL import Image

from gsanet.explore import heat
from gsanet.explore.handlers import LOOK, PICTURE, Handlers
from gsanet.explore.study import Choice


@pytest.fixture
def told(monkeypatch):
    """What the user is told."""
    found = []
    monkeypatch.setattr(gr, "Warning", lambda message, seconds: found.append(message))
    return found


@pytest.fixture
def page(explorer):
    return Handlers(explorer)


def named(names, values):
    return dict(zip(names, values, strict=True))


def event(**data):
    return gr.EventData(None, data)


def unchanged(value):
    return isinstance(value, dict) and value.get("__type__") == "update" and len(value) == 1


def maps(html):
    return re.findall(r"<span class='map'><img src='(data:image/png[^']+)'", html)


def test_the_page_as_one_finds_it(page):
    found = named(PICTURE, page.open_first())
    assert found["choice"] == Choice((3, 3), (3, 1))
    assert "<tr><th>3</th>" in found["prediction"]
    assert len(maps(found["branches"])) == 5
    assert len(maps(found["heads"])) == 1 + 8
    assert len(maps(found["stages"])) == 3
    assert "relative error of" in found["exactness"]


def test_what_is_clicked_is_shown(page):
    found = named(PICTURE, page.open_first())
    subject, choice = found["subject"], found["choice"]
    moved = named(LOOK, page.pick_pixel(subject, choice, event(x=1, y=6)))
    assert moved["choice"].at == (1, 6)
    assert "pixel 1, 6" in moved["picture"]
    assert moved["branches"] != found["branches"]
    earlier = named(LOOK, page.pick_block(subject, moved["choice"], event(stage="2", block="1")))
    assert earlier["choice"] == Choice((1, 6), (2, 1))
    assert "Stage 2, block 1, all heads" in earlier["branches"]
    one = named(LOOK, page.pick_head(subject, earlier["choice"], event(head="5")))
    assert "Stage 2, block 1, head 5" in one["branches"]
    row = named(LOOK, page.pick_branch(subject, one["choice"], event(branch="row")))
    assert row["choice"] == Choice((1, 6), (2, 1), 5, "row")
    assert maps(row["heads"])[1:] != maps(one["heads"])[1:]
    again = named(LOOK, page.set_controls(subject, row["choice"], 1, 1, 0))
    assert again["choice"] == Choice((1, 6), (1, 1), 0, "row")


def test_other_pictures(page, uploads, told):
    found = named(PICTURE, page.open_sample(event(sample="7")))
    assert found["subject"].name == "7"
    found = named(PICTURE, page.open_file(str(uploads / "moving.gif")))
    assert "moving.gif · the first of 2 frames · 60x40" in found["picture"]
    assert found["file"] is None
    assert told == []


def test_bad_uploads_are_named_and_the_page_stays(page, uploads, told):
    for name, words in {
        "bad-huge.png": "bad-huge.png has 10001x10000 pixels: more than 100 megapixels are refused.",
        "bad-text.jpg": "bad-text.jpg is not an image of a known kind.",
        "bad-cut.jpg": "bad-cut.jpg cannot be read",
    }.items():
        file, *others = page.open_file(str(uploads / name))
        assert file is None
        assert all(map(unchanged, others))
        assert told.pop().startswith(words)


def test_what_a_browser_may_send(page, told):
    found = named(PICTURE, page.open_first())
    subject, choice = found["subject"], found["choice"]
    for data in ({}, {"x": 99, "y": 0}, {"x": "one", "y": 1}, {"x": None, "y": [2]}, {"x": 1e400, "y": 0}):
        assert all(map(unchanged, page.pick_pixel(subject, choice, event(**data))))
        assert told.pop().startswith("Click on the clear part: the pixel ")
    assert named(LOOK, page.pick_head(subject, choice, event(head=99)))["choice"] == choice
    assert named(LOOK, page.pick_block(subject, choice, event()))["choice"] == choice
    assert named(LOOK, page.pick_branch(subject, choice, event(branch="<b>")))["choice"] == choice
    assert all(map(unchanged, page.open_sample(event(sample="../x"))))
    assert all(map(unchanged, page.pick_pixel(None, None, event(x=1, y=1))))
    assert "choose one again" in told.pop()
    assert all(map(unchanged, page.open_file(None)))


def test_names_are_no_html(page, tmp_path, told):
    name = "<img src=x>.png"
    Image.new("RGB", (8, 8)).save(tmp_path / name)
    found = named(PICTURE, page.open_file(str(tmp_path / name)))
    assert "<img src=x>" not in found["picture"]
    (tmp_path / name).write_text("no image")
    page.open_file(str(tmp_path / name))
    assert "&lt;img src=x&gt;.png is not an image" in told.pop()


def test_colours_are_those_of_the_figure():
    weights = np.array([[-2.0, 0.0], [1.0, 2.0]])
    _, _, content = heat.heat_map(weights, 2.0, signed=True).partition(",")
    colours = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    assert colours.shape == (2, 2, 3)
    assert colours[0, 1].tolist() == [254, 254, 254] or colours[0, 1].min() >= 253  # zero is white
    assert colours[0, 0, 2] > colours[0, 0, 0]  # blue takes away
    assert colours[1, 1, 0] > colours[1, 1, 2]  # red adds


def test_the_shade_is_what_the_network_sees(explorer, uploads):
    subject = explorer.open_file(uploads / "plain.png")  # 60x40: its middle, 40x40, is seen
    _, _, content = heat.shade(subject).partition(",")
    grey = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))), float)
    assert grey.shape == (40, 40)
    seen = np.asarray(subject.displayed.convert("L"), float)[:, 10:50]
    np.testing.assert_allclose(grey, 255 - 0.16 * (255 - seen), atol=0.51)
