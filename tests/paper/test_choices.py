"""What the recipe was chosen by: two networks under one recipe, on images that were held out."""

import json

import pytest

from gsanet.paper.choices import CONV, GSA, choices, training_loss
from gsanet.paper.matrix import matrix
from gsanet.paper.results import Results, read_results
from tests.result_files import RUN, write


@pytest.fixture
def folder(tmp_path):
    for name, top1, loss in ((f"{CONV}lr0.6", 49.73, 2.66), (f"{GSA}lr0.6", 51.12, 2.39), (f"{CONV}crop", 56.04, 1.5)):
        curve = [{"epoch": 5.0, "train_loss": 4.0}, {"epoch": 10.0, "train_loss": loss}]
        write(tmp_path, **{name: {**RUN, "run": name, "top1": top1, "holdout": 0.1, "curve": curve}})
    return tmp_path


def test_both_networks_have_one_recipe():
    names = [name.removeprefix(CONV) for name in matrix() if name.startswith(CONV)]
    alone = [choice.name for choice in choices(Results()) if choice.alone]
    assert [choice.name for choice in choices(Results()) if not choice.alone] == names
    assert all(matrix()[GSA + name].network.model != "gsa_resnet38" for name in alone)  # another module
    for name in names:
        conv, gsa = (matrix()[prefix + name] for prefix in (CONV, GSA))
        assert conv.recipe.model == "conv_resnet38"
        assert gsa.recipe.model == "gsa_resnet38"
        assert {**vars(conv.recipe), "model": ""} == {**vars(gsa.recipe), "model": ""}
        assert conv.held_out
        assert not conv.tables
        assert not gsa.tables


def test_fewer_images_are_seen_more_often_in_as_many_steps():
    whole, half, quarter = (matrix()[f"{GSA}{name}"] for name in ("crop", "half", "quarter"))
    assert (half.held_out, quarter.held_out) == (50_000, 75_000)
    for fewer in (half, quarter):
        assert abs(fewer.steps - whole.steps) < 0.02 * whole.steps
        share = fewer.recipe.evaluate_epochs / fewer.recipe.epochs  # the training loss is of as much of the run
        assert share == whole.recipe.evaluate_epochs / whole.recipe.epochs


def test_choices(folder):
    found = {choice.name: choice for choice in choices(read_results(folder))}
    both = found["lr0.6"]
    assert both.mean == pytest.approx(50.425)
    assert both.difference == pytest.approx(1.39)
    assert both.gsa is not None
    assert training_loss(both.gsa) == 2.39
    assert (both.images, both.epochs, both.training) == (90_000, 10, "tinyimagenet with lr=0.6")
    one = found["crop"]
    assert one.conv is not None
    assert (one.gsa, one.mean, one.difference) == (None, None, None)
    assert all(choice.mean is None for choice in choices(Results()))


def test_the_command(command, folder):
    shown = command("paper", "choices", "--results", folder)
    for words in ("51.12", "+1.39", "2.66, 2.39", "90,000", "not measured here yet"):
        assert words in shown
    rows = json.loads(command("paper", "choices", "--results", folder, "--json"))
    assert rows[1]["mean"] == pytest.approx(50.425)
    assert rows[0]["difference"] is None
