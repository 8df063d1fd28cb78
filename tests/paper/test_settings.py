"""What a run changed of the recipe that it names, and that runs which were trained differently are not compared."""

import pytest

from gsanet.paper.compare import compare
from gsanet.paper.figure import draw_results
from gsanet.paper.results import read_results
from gsanet.paper.settings import changes, portable_settings, training
from gsanet.paper.tables import alike, table_rows
from gsanet.train.recipe import load_recipe
from tests.result_files import RUN, write


def settings(**values):
    return portable_settings(
        load_recipe("tinyimagenet", {key.replace("__", "."): each for key, each in values.items()})
    )


def test_changes():
    assert changes("tinyimagenet", settings()) == {}
    assert changes("tinyimagenet", settings(lr=0.6, data__padding=8)) == {"lr": 0.6, "data.padding": 8}
    assert training("tinyimagenet", settings(lr=0.6, data__augment="none")) == (
        "tinyimagenet with lr=0.6, data.augment=none"
    )
    # The network, the seed and the length are said elsewhere; places are a machine's.
    same = settings(model="conv_resnet38", seed=3, epochs=20, data__path="here", compile=True)
    assert training("tinyimagenet", same) == "tinyimagenet"
    assert training("mine.yaml", settings(lr=0.6)) == "mine.yaml"  # which is not here
    assert training("tinyimagenet", {}) == "tinyimagenet"


@pytest.fixture
def folder(tmp_path):
    for name, model, top1, found in (
        ("a", "conv_resnet38", 50.0, settings(lr=0.6)),
        ("b", "gsa_resnet38", 52.0, settings(lr=0.6)),
        ("c", "conv_resnet38", 40.0, settings()),
        ("d", "gsa_resnet38", 43.0, settings()),
    ):
        run = {**RUN, "run": name, "model": model, "top1": top1, "settings": found, "length": "20 epochs"}
        write(tmp_path, **{name: run})
    return tmp_path


def test_runs_that_were_trained_differently_are_no_seeds_of_each_other(folder):
    results = read_results(folder)
    assert len(alike(results.runs)) == 4
    rows = list(table_rows(6, results))
    found = compare(6, rows, {})
    assert {
        words: [round(each.here, 2) for each in compared.differences] for (_, words, _), compared in found.items()
    } == {
        "tinyimagenet with lr=0.6": [2.0],
        "tinyimagenet": [3.0],
    }


def test_each_gets_a_picture_of_its_own(folder, tmp_path):
    pictures = draw_results(read_results(folder), tmp_path)
    assert [file.name for file in pictures] == ["results-tinyimagenet.png", "results-tinyimagenet-2.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in pictures)
    for name, model in (("e", "conv_resnet38"), ("f", "gsa_resnet38")):
        write(folder, **{name: {**RUN, "run": name, "model": model, "length": "9 epochs"}})
    assert draw_results(read_results(folder), tmp_path)[2].name == "results-tinyimagenet-9-epochs.png"


def test_a_run_comes_before_its_variants(tmp_path):
    write(tmp_path, **{name: {**RUN, "run": name} for name in ("net-light", "net", "net-seed1")})
    assert [run.run for run in read_results(tmp_path).runs] == ["net", "net-light", "net-seed1"]
