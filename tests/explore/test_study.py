"""What the explorer shows is what `gsanet explain` finds."""

import numpy as np
import pytest
from PIL import Image

import gsanet
from gsanet.explain import explain_image
from gsanet.explore.samples import sample_pictures
from gsanet.explore.study import KEPT_STUDIES, Choice, Explorer, branch_maps
from gsanet.images import UnreadableImageError
from gsanet.predict import Classifier, Transform, load_classifier
from gsanet.train.data import DataSettings


def random_explorer(**options):
    model = gsanet.create_model("gsa_resnet26_tiny", **{"width": 0.125, "num_classes": 3, "img_size": 16, **options})
    settings = DataSettings(img_size=(16, 16))
    return Explorer(Classifier(model.eval(), Transform(settings), ("a", "b", "c"), "net"))


@pytest.fixture(scope="module")
def photographs():
    return random_explorer(depths=(1, 2))


def test_the_maps_are_those_of_explain(photographs):
    subject = photographs.open_sample("cat")
    study = photographs.study(subject)
    at = (150, 70)
    found = study.explain(at)
    assert list(found) == [(1, 1), (2, 1), (2, 2)]
    for (stage, block), explanation in found.items():
        expected = explain_image(photographs.classifier, photographs.samples["cat"], at, stage, block)
        assert explanation.pixel == expected.explanation.pixel
        for name in ("content", "column", "row", "positional", "total", "values", "output"):
            np.testing.assert_allclose(getattr(explanation, name), getattr(expected.explanation, name), atol=1e-12)
        assert explanation.error < 1e-10
    assert study.guesses[0].name == expected.guess.name
    assert study.guesses[0].probability == pytest.approx(expected.guess.probability)


def test_column_times_row_is_position(photographs):
    study = photographs.study(photographs.open_sample("cat"))
    explanation = study.explain((150, 70))[2, 1]
    maps = branch_maps(explanation)
    assert list(maps) == ["both", "content", "position", "column", "row"]
    x, _ = explanation.pixel
    scale = explanation.scale.mean(1)[:, None, None]
    np.testing.assert_allclose(maps["column"] * maps["row"][:, [x]] * scale, maps["position"], atol=1e-12)
    np.testing.assert_allclose(maps["content"] + maps["position"], maps["both"], atol=1e-12)
    assert not np.delete(maps["row"], x, axis=1).any()


@pytest.mark.parametrize(
    ("off", "left"),
    [
        ({"content": False}, ["position", "column", "row"]),
        ({"row": False}, ["both", "content", "column"]),
        ({"column": False}, ["both", "content", "row"]),
        ({"column": False, "row": False}, ["content"]),
    ],
    ids=str,
)
def test_what_is_off_has_no_map(off, left):
    explorer = random_explorer(depths=(1, 1), **off)
    study = explorer.study(explorer.open_sample("cat"))
    found = study.explain(study.subject.middle)
    maps = branch_maps(found[1, 1])
    assert list(maps) == left
    if len(left) == 3 and "position" not in left:
        np.testing.assert_allclose(maps["both"], maps["content"] + maps[left[2]])
    choice = explorer.settle(Choice(study.subject.middle, (1, 1), branch="position"), found)
    assert choice.branch == ("position" if "position" in left else left[0])


def test_choices_that_do_not_exist(photographs):
    subject = photographs.open_sample("cat")
    found = photographs.study(subject).explain(subject.middle)

    def settled(place, head=0):
        choice = photographs.settle(Choice(subject.middle, place, head), found)
        return choice.place, choice.head

    assert photographs.first_choice(subject) == Choice(subject.middle, (2, 2))
    assert subject.view.locate(*subject.middle) == pytest.approx((8, 8), abs=0.1)  # of 16x16
    assert settled((1, 2)) == ((1, 1), 0)
    assert settled((7, -1)) == ((2, 2), 0)
    assert settled((2, 1), head=8) == ((2, 1), 8)
    assert settled((2, 1), head=9) == ((2, 1), 0)
    assert settled((2, 1), head=-1) == ((2, 1), 0)


def test_only_the_last_pictures_are_kept(photographs, monkeypatch):
    calls = []
    study = photographs._study
    monkeypatch.setattr(photographs, "_study", lambda subject: calls.append(subject.name) or study(subject))
    names = list(photographs.samples)
    subjects = [photographs.open_sample(name) for name in names]
    for subject in subjects:
        photographs.study(subject)
    calls.clear()
    assert len(photographs._studies) == KEPT_STUDIES < len(names)
    photographs.study(subjects[-1])
    assert calls == []
    photographs.study(subjects[0])
    assert calls == [names[0]]


def test_pictures_of_all_kinds(explorer, uploads):
    for file in uploads.iterdir():
        if file.name.startswith("bad"):
            with pytest.raises(UnreadableImageError, match=f"^{file.name}"):  # not the folder it lies in
                explorer.open_file(file)
        else:
            subject = explorer.open_file(file)
            assert subject.view.size == ((80, 20) if file.name == "tall.png" else (40, 60))
            assert subject.note == ("the first of 2 frames" if file.name == "moving.gif" else "")
            explorer.study(subject).explain(subject.middle)
    white = explorer.open_file(uploads / "clear.png").displayed
    assert white.getextrema() == ((255, 255),) * 3
    assert explorer.open_file(uploads / "deep.png").displayed.getpixel((0, 0)) == (156,) * 3


@pytest.mark.parametrize("size", [(1, 1), (1800, 2), (1, 500)])
def test_odd_shapes(explorer, tmp_path, size):
    Image.new("RGB", size, "red").save(tmp_path / "odd.png")
    subject = explorer.open_file(tmp_path / "odd.png")
    assert max(subject.displayed.size) <= 720
    found = explorer.study(subject).explain(subject.middle)
    assert all(explanation.error < 1e-10 for explanation in found.values())


def test_a_picture_with_no_pixel_to_click(photographs, tmp_path):
    Image.new("RGB", (1, 500)).save(tmp_path / "narrow.png")  # seen: seven eighths of a pixel, between two
    with pytest.raises(UnreadableImageError, match=r"narrow\.png is too narrow to click in"):
        photographs.open_file(tmp_path / "narrow.png")


def test_samples_fit_the_network(explorer, photographs):
    assert list(explorer.samples) == ["3", "0", "2", "5", "7", "8"]
    right = [name for name in explorer.samples if explorer.study(explorer.open_sample(name)).guesses[0].name == name]
    assert len(right) >= 4  # scans that it was not trained on
    assert "cat" in photographs.samples
    assert "cat" in sample_pictures([str(digit) for digit in range(10)], (224, 224))
    assert all(image.mode == "RGB" and min(image.size) >= 300 for image in photographs.samples.values())
    with pytest.raises(ValueError, match="there is no sample 'dog': the samples are rocket"):
        photographs.open_sample("dog")


def test_a_network_without_attention_is_refused(digits_run):
    with pytest.raises(ValueError, match="conv_resnet26_tiny has no GSA modules to explain"):
        Explorer(load_classifier(digits_run / "conv_resnet26_tiny", device="cpu"))
