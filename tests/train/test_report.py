import json
import math
import os
import signal
import sys

import pytest

from gsanet.train.checkpoint import CheckpointError
from gsanet.train.engine import train
from gsanet.train.interrupt import Interrupt
from gsanet.train.report import Reporter, draw_curves, duration, read_metrics
from gsanet.train.step_log import StepRecord


def test_a_resumed_run_takes_back_the_rows_that_it_writes_again(tmp_path):
    with Reporter(tmp_path, 0, 200) as reporter:
        for step in (50, 100, 150):
            reporter.row("train", step, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    with Reporter(tmp_path, 120, 200) as reporter:
        reporter.row("train", 150, {"loss": 2.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path, "train")] == [(50, 1), (100, 1), (150, 2)]


def test_rows_hold_the_mean_of_their_steps(tmp_path):
    with Reporter(tmp_path, 0, 100) as reporter:
        for step in range(1, 101):
            reporter.step(StepRecord(step, loss=float(step), lr=0.1, stop=False, save=False), batch_size=8)
    rows = read_metrics(tmp_path, "train")
    assert [(row["step"], row["loss"], row["lr"]) for row in rows] == [(50, 25.5, 0.1), (100, 75.5, 0.1)]


def test_only_the_first_process_writes(tmp_path, capsys):
    with Reporter(tmp_path, 0, 100, active=False) as reporter:
        reporter.say("hello")
        reporter.row("train", 1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_in_a_sentence(tmp_path):
    message = r"cannot write metrics to .*: No space left on device; .*--resume"
    with Reporter(tmp_path, 0, 10) as reporter, open("/dev/full", "wb", buffering=0) as full:
        reporter._metrics = full
        with pytest.raises(CheckpointError, match=message):
            reporter.row("train", 1, {"loss": 1.0})


def test_metrics_are_readable_by_anything(tmp_path):
    with Reporter(tmp_path, 0, 10) as reporter:
        reporter.row("epoch", 3, {"top1": 12.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"kind": "epoch", "step": 3, "top1": 12.5}


def test_an_evaluation_that_overflowed_is_no_number_and_flattens_no_curve(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: limits.append(figure.axes[0].get_ylim())
    )
    with Reporter(tmp_path, 0, 10) as reporter:
        for epoch, loss in enumerate((3.0, math.nan, 4e30, math.inf, 2.0)):
            reporter.row(
                "epoch", epoch, {"epoch": epoch, "train_loss": 4.0 - epoch / 2, "val_loss": loss, "top1": 30.0}
            )
    assert [row["val_loss"] for row in read_metrics(tmp_path, "epoch")] == [3.0, None, 4e30, None, 2.0]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert draw_curves({"gsa": tmp_path}, tmp_path / "curves.png") is None
    assert limits[0][1] == 8.0


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "0:04"), (61, "1:01"), (3723, "1:02:03")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_the_first_signal_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before
    child = os.fork()
    if child == 0:
        with Interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGINT


def test_a_run_without_tensorboard_and_matplotlib_says_so_in_a_line_each(tiny_recipe, tmp_path, monkeypatch, capsys):
    for module in ("torch.utils.tensorboard", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    train(tiny_recipe(steps=1), tmp_path / "run")
    said = capsys.readouterr().out
    assert "tensorboard is not installed" in said
    assert "matplotlib is not installed" in said
    assert not (tmp_path / "run" / "curves.png").exists()
