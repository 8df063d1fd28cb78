"""Differences between rows, the paper's order, the pictures, and the open questions."""

import io
import json

import pytest
from PIL import Image
from result_files import RUN, write
from rich.console import Console

from gsanet.paper import figure, tables
from gsanet.paper.compare import compare, seed_spreads
from gsanet.paper.figure import draw_results, lowest_shown
from gsanet.paper.matrix import matrix
from gsanet.paper.open_questions import QUESTIONS, answers
from gsanet.paper.printed import printed_table
from gsanet.paper.results import Results, read_results
from gsanet.paper.show import show_answers, show_comparisons, show_table
from gsanet.paper.tables import table_rows


@pytest.fixture(autouse=True)
def _no_counting(monkeypatch):
    monkeypatch.setattr(tables, "count", lambda network: (1_000_000, 10**9))


def run(model, top1, seed=0, **more):
    return {**RUN, "model": model, "top1": top1, "seed": seed, "model_kwargs": {}, "length": "20 epochs", **more}


def compared(tmp_path, number, **files):
    results = read_results(write(tmp_path, **files))
    return compare(number, list(table_rows(number, results)), seed_spreads(results))


def text_of(parts):
    console = Console(width=100, record=True, file=io.StringIO())
    for part in parts:
        console.print(part, highlight=False)
    return console.export_text()


def test_differences_have_a_sign_a_size_and_a_spread(tmp_path):
    files = {
        "a": run("conv_resnet38", 45.0),
        "b": run("conv_resnet38", 46.0, seed=1),
        "c": run("gsa_resnet38", 49.0),
        "d": run("gsa_resnet38", 49.4, seed=1),
        "e": run("gsa_resnet50", 49.1),
        "f": run("conv_resnet50", 50.5, dataset="other"),
        "g": run("gsa_resnet50", 99.0, holdout=0.1),  # to choose a recipe: no row of a table
    }
    found = compared(tmp_path, 6, **files)
    assert list(found) == [("tinyimagenet", "tinyimagenet", "20 epochs")]
    (result,) = found.values()
    (pair,) = result.differences
    assert (pair.row, pair.against) == ("ResNet-38, GSA", "ResNet-38, Convolution")
    assert (pair.paper, pair.here) == (pytest.approx(1.9), pytest.approx(3.7))
    # Variances of 0.5 and 0.08 over two seeds each, and the mean of two runs on either side.
    assert pair.noise == pytest.approx(((0.5 + 0.08) / 2) ** 0.5)
    assert pair.agrees
    assert [each.agrees for each in result.pairs] == [True, True, False]
    wrong = result.pairs[2]
    assert (wrong.paper, wrong.here) == (pytest.approx(-0.7), pytest.approx(0.1))
    assert wrong.is_within_noise
    text = " ".join(text_of(show_comparisons(found)).split())
    assert "from ResNet-38, Convolution" in text
    assert "ResNet-38, GSA +1.9 +3.70 ±0.54 same sign" in text
    assert "The paper's order holds for 2 of 3 pairs of measured rows." in text
    assert "≠ ResNet-38, GSA against ResNet-50, GSA: the paper -0.7, here +0.10, within the spread" in text


def test_the_baselines_of_the_other_tables(tmp_path):
    found = compared(tmp_path, 3, a=run("gsa_resnet50", 50.0), b=run("aa_resnet50", 50.5), c=run("gsa_resnet101", 51.0))
    (result,) = found.values()
    (pair,) = result.differences
    assert (pair.row, pair.against) == ("ResNet-50, Bello et al. (2019)", "ResNet-50, This work")
    assert (pair.paper, pair.here, pair.noise) == (pytest.approx(-0.8), pytest.approx(0.5), None)
    assert "other sign" in text_of(show_comparisons(found))
    found = compared(tmp_path, 4, a=run("gsa_resnet50", 50.0), b=run("gsa_resnet50", 40.0, model_kwargs={"row": False}))
    (result,) = found.values()
    assert result.differences[0].against == "Content, Col., Row"
    assert result.differences[0].here == pytest.approx(-10)


def test_one_row_is_nothing_to_compare(tmp_path):
    assert compared(tmp_path, 6, a=run("gsa_resnet50", 50.0)) == {}


def test_lengths_are_told_apart(tmp_path):
    models = {"conv": "conv_resnet38", "gsa": "gsa_resnet38"}
    files = {
        f"{name}{epochs}": run(model, 50.0 + epochs, length=f"{epochs} epochs")
        for name, model in models.items()
        for epochs in (10, 20)
    }
    results = read_results(write(tmp_path, **files))
    rows = list(table_rows(6, results))
    text = text_of([*show_table(printed_table(6), rows), *show_comparisons(compare(6, rows, seed_spreads(results)))])
    for epochs in (10, 20):
        assert text.count(f"tinyimagenet, {epochs} epochs, 1 run") == 2
        assert text.count(f"Differences in top-1, tinyimagenet, {epochs} epochs") == 1


def test_the_command_has_the_differences_as_json(tmp_path, command):
    write(tmp_path, a=run("conv_resnet38", 45.0), b=run("gsa_resnet38", 49.0))
    content = json.loads(command("paper", "table6", "--results", tmp_path, "--json"))
    (found,) = content["compared"]
    assert found["differences"][0]["here"] == 4
    assert found["order_holds"] == [True]


def test_pictures(tmp_path, command):
    figures = {"params": 12_000_000, "flops": 2 * 10**9, "images_per_second": 9000.0}
    files = {
        "a": run("conv_resnet38", 45.0, **figures),
        "b": run("gsa_resnet38", 48.0, **figures),
        "c": run("gsa_resnet38", 49.0, seed=1, **figures),
        "d": run("gsa_resnet38", 80.0, dataset="cifar100", recipe="cifar100"),
    }
    said = command("paper", "figures", "--results", write(tmp_path, **files), "--out", tmp_path)
    assert [file.name for file in tmp_path.glob("*.png")] == ["results-tinyimagenet.png"]
    assert "results-tinyimagenet.png" in said
    assert Image.open(tmp_path / "results-tinyimagenet.png").width > 1000
    drawn = (tmp_path / "results-tinyimagenet.png").read_bytes()
    write(tmp_path, e=run("gsa_resnet38", 50.0, model_kwargs={"content": False}, **figures))
    draw_results(read_results(tmp_path), tmp_path)
    assert (tmp_path / "results-tinyimagenet.png").read_bytes() == drawn  # parts of the module are left out
    write(tmp_path, f=run("gsa_resnet38", 50.0, model_kwargs={"groups": [2, 3, 4]}, **figures))
    draw_results(read_results(tmp_path), tmp_path)
    assert (tmp_path / "results-tinyimagenet.png").read_bytes() != drawn
    with pytest.raises(ValueError, match="nothing to draw: the folder of results holds no two runs"):
        draw_results(Results(), tmp_path)
    assert "there is no folder" in command("paper", "figures", "--out", tmp_path / "none", code=2)


def test_a_network_far_below_the_others_does_not_squeeze_them(tmp_path, monkeypatch):
    accuracies = {"gsa_resnet38": 60.0, "gsa_resnet50": 61.0, "conv_resnet38": 59.5, "a2_resnet50": 60.5}
    assert lowest_shown(list(accuracies.values())) < 58
    assert lowest_shown([*accuracies.values(), 58.6]) < 58.6
    assert 50 < lowest_shown([*accuracies.values(), 50.0]) < 59.5
    assert lowest_shown([60.0, 50.0]) == 50
    figures = {"params": 12_000_000, "flops": 2 * 10**9, "images_per_second": 9000.0}
    drawn = []
    monkeypatch.setattr(figure, "_write_names", lambda plot, points: drawn.append((plot.get_ylim(), points)))
    files = {name: run(name, top1, **figures) for name, top1 in {**accuracies, "san19_patchwise": 50.0}.items()}
    write(tmp_path, **files)
    draw_results(read_results(tmp_path), tmp_path)
    assert len(drawn) == 3
    for (bottom, top), points in drawn:
        assert 58 < bottom < 59.5 < 61 < top
        assert [name for name, *_ in points][-1] == "san19_patchwise: 50.0"
        assert bottom < points[-1][2] < 59.5


def test_open_questions(tmp_path):
    others = [name for name, run in matrix().items() if not (run.tables or run.question)]
    untold = [name for name in others if not matrix()[name].recipe.data_settings.holdout]
    assert untold == list(QUESTIONS)
    assert "not measured here yet" in text_of(show_answers(answers(Results())))
    files = {
        "a": run("gsa_resnet38", 49.0, run="gsa38"),
        "b": run("gsa_resnet38", 50.0, seed=1, run="gsa38-seed1"),
        "c": run("gsa_resnet38_query_softmax", 48.0, run="gsa38-query-softmax"),
    }
    rows = answers(read_results(write(tmp_path, **files)))
    assert rows[0].measured.top1 == 49.5
    assert (rows[1].run, rows[1].difference) == ("gsa38-query-softmax", -1.5)
    assert "-1.50" in text_of(show_answers(rows))
    files |= {
        "d": run("gsa_resnet50", 52.0, run="gsa50-content-column", model_kwargs={"row": False}),
        "e": run("gsa_resnet50_normed_axis", 54.0, run="gsa50-normed-column", model_kwargs={"row": False}),
    }
    rows = answers(read_results(write(tmp_path, **files)))
    assert (rows[-2].against, rows[-2].difference) == ("gsa50-content-column", 2.0)
    assert "gsa50-normed-column, against gsa50-content-column" in text_of(show_answers(rows))
