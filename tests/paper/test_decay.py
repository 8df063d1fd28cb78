"""What weight decay does: the same network under the decay of the tables and under the recipe's."""

import json

import pytest

from gsanet.paper.decay import SUFFIX, decayed
from gsanet.paper.matrix import matrix
from gsanet.paper.results import Results, read_results
from tests.result_files import RUN, write


@pytest.fixture
def folder(tmp_path):
    for name, top1, loss in (("gsa38", 58.95, 1.68), ("gsa38-light", 55.21, 1.05), ("conv38-light", 58.48, 1.49)):
        curve = [{"epoch": 20.0, "train_loss": loss}]
        write(tmp_path, **{name: {**RUN, "run": name, "top1": top1, "curve": curve}})
    return tmp_path


def test_only_weight_decay_differs():
    for row in decayed(Results()):
        chosen, light = matrix()[row.name], matrix()[row.name + SUFFIX]
        assert chosen.tables
        assert not light.tables
        assert chosen.recipe.weight_decay > light.recipe.weight_decay
        assert {**vars(chosen.recipe), "weight_decay": 0} == {**vars(light.recipe), "weight_decay": 0}


def test_gained(folder):
    found = {row.name: row for row in decayed(read_results(folder))}
    assert found["gsa38"].gained == pytest.approx(3.74)
    assert (found["conv38"].chosen, found["conv38"].gained) == (None, None)


def test_the_command(command, folder):
    shown = command("paper", "decay", "--results", folder)
    for words in ("58.95", "1.05", "+3.74", "0.001 in the tables", "not measured here yet"):
        assert words in shown
    rows = json.loads(command("paper", "decay", "--results", folder, "--json"))
    assert rows[1]["gained"] == pytest.approx(3.74)
