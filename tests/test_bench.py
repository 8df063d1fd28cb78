import io
import json

import pytest
import torch
from result_files import RUN, write
from rich.console import Console
from torch import nn

import gsanet
from gsanet import bench as module
from gsanet.bench import BenchRow, BenchSetting, TrainingStep, bench, milliseconds, one_line, saved_bytes
from gsanet.paper.figure import PRINTED, accuracies, draw
from gsanet.paper.printed import Network
from gsanet.paper.results import Results, read_results
from gsanet.paper.show import show_bench

TINY = ["conv_resnet26_tiny", "gsa_resnet26_tiny"]
SMALL = BenchSetting(img_size=(16, 16), batch=2, seconds=0.01)


@pytest.fixture(scope="module")
def rows():
    return bench([(name, {}) for name in TINY], SMALL)


def test_all_is_measured(rows):
    assert [row.model for row in rows] == TINY
    for row in rows:
        assert not row.errors
        model = gsanet.create_model(row.model, img_size=16)
        assert row.params == gsanet.count_parameters(model)
        assert row.flops == gsanet.count_flops(model, 16)
        assert row.inference_images_per_second > row.train_images_per_second > 0
        assert 0 < row.latency_ms < 1e3 * 2 / row.train_images_per_second
        assert row.train_memory > 0
        assert row.inference_memory is None  # nothing counts it on a CPU


def test_a_network_that_fails_is_reported_and_the_rest_goes_on(monkeypatch):
    create = module.gsanet.create_model

    class Full(nn.Module):
        def forward(self, x):
            if self.training:
                raise torch.OutOfMemoryError("no room\nfor this")
            return x.mean((2, 3))

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    def pretend(name, **kwargs):
        if name == "absent":
            raise ValueError("no such network\nat all")
        return Full() if name == "full" else create(name, **kwargs)

    monkeypatch.setattr(module.gsanet, "create_model", pretend)
    said = []
    setting = BenchSetting(img_size=(16, 16), batch=2, seconds=0.01)
    networks = [("absent", {}), ("full", {}), (TINY[0], {"groups": ()})]
    absent, full, tiny = bench(networks, setting, lambda what, part: said.append((what, part)))
    assert absent.errors == {"making": "no such network"}
    assert full.errors == {"training": "out of memory"}
    assert full.train_images_per_second is None
    assert full.latency_ms > 0
    assert not tiny.errors
    assert tiny.train_images_per_second > 0
    assert all(0 <= part <= 1 for _, part in said)
    assert said[-1] == ("done", 1.0)
    text = shown([absent, full, tiny], setting)
    assert "full, training: out of memory" in text
    assert tiny.name == "conv_resnet26_tiny, groups=()"


def shown(rows, setting):
    console = Console(width=80, record=True, file=io.StringIO())
    for part in show_bench(rows, setting, {"device": "a machine"}):
        console.print(part, highlight=False)
    return console.export_text()


def test_shown_at_80_columns(rows):
    text = shown(rows, SMALL)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "16x16, batch 2, float32, a machine" in text
    assert all(name in text for name in TINY)


def test_turns_are_fair_and_errors_are_raised_unless_someone_listens():
    ran = []
    times = milliseconds({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, "cpu", 1e-9)
    assert ran == ["a", "b"] * 4  # once before, and three turns at least
    assert set(times) == {"a", "b"}

    def broken():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        milliseconds({"a": broken}, "cpu", 1e-9)
    heard = []
    assert milliseconds({"a": broken}, "cpu", 1e-9, lambda name, error: heard.append(name)) == {}
    assert heard == ["a"]


def test_errors_in_one_line():
    assert one_line(ValueError("no such network\nat all")) == "no such network"
    assert one_line(RuntimeError("backend='x' raised:\nTypeError: y\n\na page")) == "backend='x' raised: TypeError: y"
    assert one_line(RuntimeError()) == "RuntimeError"


def test_what_is_prepared_comes_before_each_turn():
    ran = []
    milliseconds({"a": lambda: ran.append("a")}, "cpu", 1e-9, prepare=lambda: ran.append("prepared"))
    assert ran == ["prepared", "a"] * 4


def test_what_forward_keeps():
    """A linear layer keeps its input and its weight, an elementwise product both factors; each counted once."""
    x = torch.randn(4, 8, requires_grad=True)
    linear = nn.Linear(8, 8, bias=False)
    assert saved_bytes(lambda: linear(x)) == 4 * (4 * 8 + 8 * 8)
    assert saved_bytes(lambda: x * x) == 4 * 4 * 8


def test_a_training_step_leaves_no_gradients_and_hardly_moves_the_weights():
    model = gsanet.create_model(TINY[0], img_size=16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = TrainingStep(model, torch.randn(2, 3, 16, 16), torch.bfloat16)
    step()
    assert all(parameter.grad is None for parameter in model.parameters())
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8"}, "dtype must be one of float32, bfloat16, float16, got 'float8'"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"batch": 0}, "batch and seconds must be positive, got 0 and 1.0"),
        ({"seconds": float("nan")}, "batch and seconds must be positive, got .* and nan"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        BenchSetting(**options)


def test_accuracies(tmp_path):
    results = read_results(
        write(
            tmp_path,
            a=RUN,
            b={**RUN, "seed": 1, "top1": 49.11},
            longer={**RUN, "length": "20 epochs", "top1": 55.0},
            choice={**RUN, "holdout": 0.1, "top1": 1.0},
            question={**RUN, "question": "of its own", "top1": 2.0},
        )
    )
    assert accuracies(Network("gsa_resnet38"), results) == {
        PRINTED: 77.8,
        "tinyimagenet, tinyimagenet, measured here": pytest.approx(49.42),
        "tinyimagenet, tinyimagenet, 20 epochs, measured here": 55.0,
    }
    assert accuracies(Network("san19_patchwise"), Results()) == {PRINTED: 78.2}
    assert accuracies(Network("nonlocal_resnet50"), Results()) == {}
    assert accuracies(Network("gsa_resnet50", (("groups", (2, 3, 4)),)), Results()) == {PRINTED: 78.7}


def test_plot(tmp_path):
    rows = [
        BenchRow("gsa_resnet38", {}, 14_202_728, 5_894_959_104, latency_ms=5.0),
        BenchRow("gsa_resnet50", {}, 18_052_856, 7_170_433_024, latency_ms=None),
        BenchRow("nonlocal_resnet50", {}, 1, 1, latency_ms=1.0),
    ]
    results = read_results(write(tmp_path, a=RUN))
    draw(rows, results, "224x224", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(rows[2:], Results(), "224x224", tmp_path / "none.png")


def test_command(gsanet, tmp_path):
    out = tmp_path / "bench.json"
    options = ["--img-size", "16", "--batch", "2", "--seconds", "0.01", "--device", "cpu", "--out", str(out), "--json"]
    code, printed, complaint = gsanet("bench", "--models", "*26_tiny", *options)
    assert (code, complaint.strip()) == (0, "")
    assert json.loads(printed) == json.loads(out.read_text())
    assert len(read_results(tmp_path).latencies) == 2  # what it writes is what the tables read
