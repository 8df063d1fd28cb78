"""Past the paper: pairs that are compared with each other and stand in no table."""

import json

import pytest

from gsanet.paper.best import PAIRS, pairs, paper_best
from gsanet.paper.matrix import matrix
from gsanet.paper.results import Results, read_results
from gsanet.paper.tables import table_rows
from tests.result_files import RUN, write


@pytest.fixture
def folder(tmp_path):
    common = {**RUN, "dataset": "cifar100", "recipe": "cifar100-scratch", "question": "past the paper"}
    for name, model, top1 in (("best-gsa38", "gsa_resnet38", 84.5), ("best-conv38", "conv_resnet38", 82.25)):
        write(tmp_path, **{name: {**common, "run": name, "model": model, "top1": top1}})
    return tmp_path


def test_the_pairs_are_runs_of_the_matrix_under_one_recipe():
    for gsa, conv in (tuple(matrix()[name] for name in names) for names in PAIRS.values()):
        assert gsa.recipe.model.replace("gsa", "conv") == conv.recipe.model
        ours, theirs = (
            {key: value for key, value in vars(run.recipe).items() if key not in ("model", "model_kwargs")}
            for run in (gsa, conv)
        )
        assert ours == theirs
        assert {**gsa.recipe.model_kwargs, "groups": None} == {**conv.recipe.model_kwargs, "groups": None}


def test_pairs(folder):
    scratch, tuned = pairs(read_results(folder))
    assert scratch.difference == 2.25
    assert (tuned.gsa, tuned.conv, tuned.difference) == (None, None, None)
    assert paper_best() == ("ResNet-50, GSA", 83.9)
    assert not any(row.measured for row in table_rows(6, read_results(folder)))  # a question of their own
    assert len(pairs(Results())) == 2


def test_the_command(command, folder):
    shown = command("paper", "best", "--results", folder)
    for words in ("84.50", "82.25", "+2.25", "83.9", "not measured here yet", "cifar100-scratch"):
        assert words in shown
    assert json.loads(command("paper", "best", "--results", folder, "--json"))[0]["difference"] == 2.25
