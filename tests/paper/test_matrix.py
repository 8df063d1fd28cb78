"""The experiments: what the matrix holds, and that they are made, cut, continued and recorded."""

import fcntl
import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from gsanet.paper import best, decay, run_matrix, studies
from gsanet.paper.matrix import choose, matrix, read_matrix
from gsanet.paper.place import Place
from gsanet.paper.plan import Pace, plan_lines
from gsanet.paper.printed import printed_table
from gsanet.paper.record import record_run
from gsanet.paper.results import read_results
from gsanet.paper.run_matrix import run_command, run_experiments
from gsanet.train.checkpoint import replace_file
from gsanet.train.engine import make_model, train
from gsanet.train.recipe import load_recipe
from gsanet.train.report import duration

SMALL = """
datasets:
  digits: {train_images: 1437, classes: 10}
kinds:
  scratch:
    recipe: quickstart
    dataset: digits
    set: {steps: 6, model_kwargs.width: 0.125, model_kwargs.depths: [1, 1]}
runs:
  gsa: {kind: scratch, model: gsa_resnet26_tiny, seeds: [0, 1]}
  choice: {kind: scratch, model: gsa_resnet26_tiny, set: {data.holdout: 0.1, steps: 2}}
  tuned: {kind: scratch, model: gsa_resnet26_tiny, set: {steps: 2}, weights: gsa}
"""


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_every_row_of_the_tables_has_a_run(number):
    runs = choose([], table=number)
    for row in printed_table(number).rows:
        assert any(run.network == row.network for run in runs if run.dataset == "tinyimagenet"), row.key
    assert len({(run.recipe.batch_size, run.recipe.lr, run.recipe.epochs, run.recipe.image_size) for run in runs
                if run.dataset == "tinyimagenet"}) == 1  # fmt: skip


def test_the_runs_can_be_made():
    assert len(matrix()) == 85
    assert [name for name in matrix() if name.endswith("seed1")] == [
        *(f"{name}{depth}-seed1" for depth in (38, 50, 101) for name in ("conv", "gsa")),
        "gsa50-groups-234-seed1",
    ]
    for run in matrix().values():
        assert run.recipe.seed in (0, 1)
        assert bool(run.weights) == run.name.startswith(("cifar100-", "best-tuned-"))
        if run.weights:
            assert matrix()[run.weights].network == run.network
        if run.question:
            assert run.name in sum(best.PAIRS.values(), ()) or run.name.endswith(decay.SUFFIX)
            assert not run.tables
    assert (matrix()["gsa50"].tables, matrix()["gsa50"].rows) == ((2, 3, 4, 5, 6), [])
    clipped = matrix()["gsa50-clipped"]
    assert (clipped.tables, clipped.rows) == ((2, 3), ["table2: Proposed GSA module", "table3: ResNet-50, This work"])
    for name in ("conv38", "san-19", "gsa38-norm-qkv", "gsa38-reach-3"):
        assert matrix()[name].flops > 4e8
    gsa38 = matrix()["gsa38"]
    assert gsa38.steps == 20 * (100_000 // 512)
    assert gsa38.recipe.model_kwargs == {"stem": "7x7/2", "conv_init": "pytorch"}


def test_every_network_can_be_made():
    with torch.device("meta"):
        for run in {run.network: run for run in matrix().values()}.values():
            make_model(run.recipe, run.classes)
        normed = make_model(matrix()["gsa50-normed-column"].recipe, 200)
    modules = [module for module in normed.modules() if isinstance(module, studies.NormedAxisGSA)]
    assert len(modules) == 16
    assert all(module.rel_row is None and module.rel_column is not None for module in modules)


def test_the_changed_modules_differ_in_what_they_say():
    torch.manual_seed(0)
    module, split = (kind(32, feat_size=6, stride=2) for kind in (studies.GlobalSelfAttention, studies.SplitGSA))
    split.load_state_dict(module.state_dict())
    x = torch.randn(2, 32, 6, 6)
    torch.testing.assert_close(split(x), module(x))
    softmax = studies.QuerySoftmaxGSA(32, feat_size=6)
    torch.nn.init.zeros_(softmax.rel_row)  # no positional attention
    assert softmax(x).abs().max() <= softmax.qkv(x)[:, 64:].abs().max() + 1e-5  # a convex combination of values
    tables = studies.UnscaledTablesGSA(512, feat_size=64).rel_row
    assert tables.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert len(studies.NormQKVGSA(32, feat_size=6).norms) == 3
    normed = studies.NormedAxisGSA(32, feat_size=6, row=False)
    torch.nn.init.zeros_(normed.rel_column)
    alone = normed(x)  # content attention
    torch.nn.init.normal_(normed.rel_column, std=1000.0)
    positional = normed(x) - alone
    assert positional.std().item() == pytest.approx(1, rel=0.05)  # whatever the embeddings are
    for kind, variance in ((studies.HeKeysGSA, 2), (studies.SharpKeysGSA, 8)):
        q, k, v = kind(512, feat_size=4).qkv.weight.split(512)
        assert k.std().item() == pytest.approx((variance / 512) ** 0.5, rel=0.02)
        assert q.std().item() == pytest.approx(v.std().item(), rel=0.02)
        assert v.std().item() == pytest.approx((1 / 3 / 512) ** 0.5, rel=0.02)


def test_choosing():
    assert [run.name for run in choose(["gsa38", "conv38"])] == ["gsa38", "conv38"]
    first, second, *others = [run.name for run in choose(["gsa50", "gsa38", "gsa*"], table=6)]
    assert (first, second) == ("gsa50", "gsa38")
    assert others.index("gsa101") < others.index("gsa38-reach-3") < others.index("conv38")
    assert len({first, second, *others}) == len(others) + 2
    assert len(choose(["cifar100-*"])) == 6
    with pytest.raises(ValueError, match="unknown run 'gsa83': did you mean 'gsa38'"):
        choose(["gsa83"])
    with pytest.raises(ValueError, match="unknown run 'zzz': `gsanet paper run --list` shows them"):
        choose(["zzz"])
    with pytest.raises(ValueError, match="starts from the weights of gsa0, which is no run"):
        read_matrix(SMALL.replace("weights: gsa", "weights: gsa0"))


@pytest.fixture
def small(monkeypatch, tmp_path):
    found = read_matrix(SMALL)
    for module in ("matrix", "plan", "run_matrix"):
        monkeypatch.setattr(f"gsanet.paper.{module}.matrix", lambda: found)
    monkeypatch.setattr(run_matrix, "LEAST", float("-inf"))
    return found, Place(tmp_path / "work", tmp_path / "results", {"digits": "digits"})


def command_of(place, *names, **options):
    """What it says, and its exit code."""
    said = []
    common = {"data": ["digits=digits"], "work": place.work, "results": place.results, "commit": "abc"}
    return said, run_command(names, **common, **options, say=said.append)


def test_runs_are_made_cut_continued_and_recorded(small):
    found, place = small
    # The time is up at once: the first run is cut, nothing else is begun.
    said, code = command_of(place, everything=True, stop_after=0.0)
    assert code == 0
    assert 0 < place.steps_done(found["gsa"]) < found["gsa"].steps == 6
    assert not place.run("choice").exists()
    assert any("gsa: " in line and "at step" in line for line in said)
    assert any("tuned" in line and "waits for gsa" in line for line in said)

    said, code = command_of(place, everything=True)
    assert code == 0
    assert said[-1] == "Nothing is left: all of these runs have results."
    runs = {run.run: run for run in read_results(place.results).runs}
    assert sorted(runs) == ["choice", "gsa", "gsa-seed1", "tuned"]
    gsa = runs["gsa"]
    state = json.loads((place.run("gsa") / "last" / "checkpoint.json").read_text())["state"]
    assert (gsa.top1, gsa.top5) == (state["evaluation"]["top1"], state["evaluation"]["top5"])
    assert [(row["step"], row["epoch"]) for row in gsa.curve] == [(6, 6 / 22)]
    assert (gsa.commit, gsa.command, gsa.length) == ("abc", "gsanet paper run gsa", "6 steps")
    assert gsa.evaluated_on == "the 360 held-out images of digits"
    assert gsa.settings["lr"] == 0.1
    assert gsa.versions["torch"] == torch.__version__
    assert gsa.images_per_second > 0
    assert gsa.seconds > 0
    assert runs["choice"].holdout == 0.1
    assert runs["choice"].evaluated_on == "the 144 training images, held out, of digits"
    assert runs["tuned"].weights == "gsa"
    assert runs["tuned"].curve[0]["train_loss"] < gsa.curve[0]["train_loss"]
    assert "/" not in json.dumps(gsa.settings["data"])  # no place of this machine

    # What has results is not made again; the estimate knows how fast it was.
    place.result("gsa-seed1").unlink()
    (line, run) = plan_lines(found.values(), place)
    assert "Left: 1 runs" in line
    assert "at the speed of the finished runs" in line
    assert run.startswith("  gsa-seed1: ")
    said, _ = command_of(place, "gsa")
    assert "done before" in said[0]


@contextmanager
def made_by_another(place, name):
    """As if another process made a run."""
    place.work.mkdir(parents=True, exist_ok=True)
    with place.lock(name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_processes_share_the_runs(small):
    _, place = small
    with made_by_another(place, "gsa"):
        said, _ = command_of(place, "gsa", "choice")
    assert place.result("choice").exists()
    assert not place.run("gsa").exists()
    assert any(line.startswith("  gsa: ") and "not begun" in line for line in said)
    command_of(place, "gsa")
    assert place.result("gsa").exists()


def test_weights_that_another_process_makes_are_waited_for(small, monkeypatch):
    found, place = small
    looks = []

    def make_them():
        looks.append(None)
        if len(looks) == 2:
            other.close()
            run_experiments([found["gsa"]], place, "abc", say=lambda line: None)

    monkeypatch.setattr(run_matrix, "_wait_for_others", make_them)
    with ExitStack() as other:
        other.enter_context(made_by_another(place, "gsa"))
        assert run_experiments([found["tuned"]], place, "abc", say=lambda line: None) == 0
    assert len(looks) == 2
    assert place.result("tuned").exists()


def test_only_what_can_be_finished_is_begun(small, monkeypatch):
    _, place = small
    monkeypatch.setattr("gsanet.paper.plan.Pace.seconds", lambda _, run, images: 50.0 if run.name == "choice" else 90.0)
    with made_by_another(place, "gsa-seed1"):  # it takes half of the device
        monkeypatch.setattr(run_matrix, "_wait_for_others", lambda: pytest.exit("it waits"))
        with pytest.raises(pytest.exit.Exception, match="it waits"):
            command_of(place, "gsa", "choice", stop_after=80.0, whole=True)
    assert not place.run("choice").exists()
    command_of(place, "gsa", "choice", stop_after=80.0, whole=True)
    assert place.result("choice").exists()
    assert not place.run("gsa").exists()


def test_how_fast_a_run_is_may_be_known_before(small):
    found, place = small
    run = replace(found["gsa"], images_per_second=50.0)
    assert Pace(place).seconds(found["gsa"], 1000) is None
    assert Pace(place).seconds(run, 1000) == 20
    assert f"about {duration(place.images_left(run) / 50)}" in plan_lines([run], place)[1]
    slow = {name: one.images_per_second for name, one in matrix().items() if one.images_per_second}
    assert slow == {"axial50": 14500, "sasa-50": 7219, "lr-50": 9000, "lr-101": 5000, "axial-deeplab-s": 9000}


def test_a_run_that_fails_does_not_end_the_others(small, monkeypatch):
    _, place = small

    def train_all_but_one(recipe, out, **options):
        if out.name == "gsa":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(recipe, out, **options)

    monkeypatch.setattr(run_matrix, "train", train_all_but_one)
    said, code = command_of(place, "gsa", "choice")
    assert code == 1
    assert any(line.startswith("gsa: failed") and "CUDA out of memory" in line for line in said)
    assert place.result("choice").exists()


def test_what_failed_in_another_process_is_passed_over(small, monkeypatch):
    found, place = small
    looks = []

    def diverge():
        looks.append(None)
        replace_file(place.failure("gsa"), b"the loss became nan")
        other.close()

    monkeypatch.setattr(run_matrix, "_wait_for_others", diverge)
    with ExitStack() as other:
        other.enter_context(made_by_another(place, "gsa"))
        assert run_experiments([found["tuned"], found["gsa"]], place, "abc", say=lambda line: None) == 0
    assert len(looks) == 1
    assert not place.run("gsa").exists()
    os.utime(place.failure("gsa"), (0, 0))  # before this command: it is tried again
    assert run_experiments([found["gsa"]], place, "abc", say=lambda line: None) == 0
    assert place.result("gsa").exists()


def test_another_recipe_is_not_continued(small):
    found, place = small
    run_experiments([found["gsa"]], place, "abc", stop_after=0.0, say=lambda line: None)
    other = read_matrix(SMALL.replace("steps: 6", "steps: 7"))
    with pytest.raises(ValueError, match="was begun with another recipe than the matrix has now"):
        run_experiments([other["gsa"]], place, "abc", say=lambda line: None)
    place.result("gsa").parent.mkdir(parents=True)
    place.result("gsa").write_text("{}")
    assert "bring" in place.obstacle(found["tuned"])


def test_any_finished_run_can_be_recorded(tiny_run, tmp_path, command):
    said = command(
        *("paper", "record", "--run", tiny_run, "--name", "try", "--recipe", "quickstart", "--commit", "abc"),
        *("--results", tmp_path),
    )
    assert "of the 144 training images, held out, of digits" in said
    (run,) = read_results(tmp_path).runs
    assert run.run == "try"
    assert (run.holdout, run.length, len(run.curve)) == (0.1, "3 steps", 1)
    assert run.command.startswith("gsanet train --recipe quickstart --set ")
    assert "--set steps=3" in run.command
    assert "--set data.holdout=0.1" in run.command
    assert run.commit == "abc"
    rows = matrix()["gsa50-clipped"].rows
    record_run(tiny_run, tmp_path / "runs" / "try.json", recipe_name="quickstart", commit="abc", rows=rows)
    assert read_results(tmp_path).runs[0].rows == rows
    (tiny_run / "speeds.json").write_text("[100.0, 300.0, 200.0]")  # others may have been at work
    alone = record_run(tiny_run, tmp_path / "runs" / "try.json", recipe_name="quickstart", commit="abc")
    assert alone.images_per_second == 300
    for noted in ("def", None):  # by the process that trained, whatever is checked out now
        sessions = json.loads((tiny_run / "environment.json").read_text())
        sessions[-1]["commit"] = noted
        (tiny_run / "environment.json").write_text(json.dumps(sessions))
        if noted:
            assert record_run(tiny_run, tmp_path / "runs" / "try.json", recipe_name="quickstart").commit == noted
    with pytest.raises(ValueError, match="was made outside of a checkout: --commit HASH"):
        record_run(tiny_run, tmp_path / "runs" / "try.json", recipe_name="quickstart")
    state = json.loads((tiny_run / "last" / "checkpoint.json").read_text())
    state["state"]["step"] = 2
    (tiny_run / "last" / "checkpoint.json").write_text(json.dumps(state))
    elsewhere = ["--name", "../try", "--recipe", "quickstart", "--commit", "abc", "--results", tmp_path / "other"]
    assert "without folders, got '../try'" in command("paper", "record", "--run", tiny_run, *elsewhere, code=2)
    assert not (tmp_path / "other").exists()
    complaint = command("paper", "record", "--run", tiny_run, "--name", "try", "--recipe", "quickstart", code=2)
    assert "is at step 2 of 3" in complaint


@pytest.fixture
def tiny_run(tmp_path):
    values = {"model_kwargs.width": 0.125, "model_kwargs.depths": [1, 1], "steps": 3, "data.holdout": 0.1}
    train(load_recipe("quickstart", values), tmp_path / "run")
    return tmp_path / "run"


def test_mistakes(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        ([], "say which runs"),
        (["gsa83"], "did you mean 'gsa38'"),
        (["gsa38", "--data", "imagenet=x"], "--data takes DATASET=PATH"),
        (["gsa38", "--data", "tinyimagenet"], "--data takes DATASET=PATH"),
        (["gsa38", "--commit", "abc", "--whole"], "say how long there is, --stop-after SECONDS"),
        (["gsa38", "--commit", "abc", "--processes", "0"], "--processes must be 1 or more, got 0"),
    ):
        assert words in command("paper", "run", *arguments, code=2)
    assert "no folder data/tinyimagenet" in command("paper", "run", "gsa38", "--commit", "abc", code=2)
    monkeypatch.setattr(run_matrix, "package_commit", lambda: None)
    with pytest.raises(ValueError, match="say which, --commit HASH"):
        run_command(["gsa38"])


def test_the_command_needs_no_terminal_library():
    script = """
import sys
sys.modules.update(typer=None, rich=None)
from gsanet.paper.run_matrix import main
sys.exit(main(["--list", "gsa38", "--results", "nowhere"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gsa38: 2.00 M images of 1.80 GFLOPs, not begun" in done.stdout
