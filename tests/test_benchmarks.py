import importlib.util
import io
import itertools
import json
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cuts
import expansions
import launches
import measure as measuring
import modules
import networks
import profile_step
import projection_gradients
import pytest
import run as runner
import start_up
import torch
import torchvision
from measure import Graphed, Measured, measure
from registry import CASES, Case, Row, Setting, SkippedError, Target, load_cases
from report import Report, default_file, losses, markdown, read_report, row_line, tables
from rich.console import Console
from rivals import GsaPytorch, SoftmaxAttention, fold_batch_norms
from start_up import full_speed, time_calls
from torch import nn
from torch.autograd import DeviceType

ROOT = Path(__file__).parents[1]
TINY = Setting(seconds=0.001, img_size=32)
FACTS = {"device": "NVIDIA H200", "torch": "2", "commit": "abc"}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(modules, "STAGES", [(8, 16), (4, 32)])
    monkeypatch.setattr(modules, "SIZES", [4, 8])
    monkeypatch.setattr(start_up, "SIZE", 8)
    yield
    if measuring._shared:
        measuring.forget()


@pytest.mark.parametrize("name", load_cases())
def test_every_case_runs_on_a_cpu(name):
    if name == "memory":
        with pytest.raises(SkippedError, match="needs a GPU"):
            list(CASES[name].rows(TINY))
        return
    if name == "gsa-pytorch":
        pytest.importorskip("gsa_pytorch")
    rows = list(CASES[name].rows(TINY))
    assert rows
    for row in rows:
        assert row.ours in row.sides
        assert all(value > 0 for value in row.sides.values())
        assert set(row.errors) <= {"gsa-pytorch"}  # where that is not installed
        assert (row.ratio is None) == (len(row.sides) == 1)
        assert row.met(judged=False) is None
        assert CASES[name].summary.endswith(".")
    if name in ("inference", "latency"):
        assert [row.rival for row in rows] == ["ResNet-50", "ResNet-50 with our epilogues"]
        assert rows[0].sides[rows[0].ours] == rows[1].sides[rows[1].ours]
        assert [row.target is None for row in rows] == [False, True]
    if name == "module":
        assert [row.what for row in rows][:2] == ["8x8x16, forward", "8x8x16, forward + backward"]
        assert {"gsanet", "reference", "softmax attention"} <= set(rows[0].sides)
        assert all(0 < row.fraction_of_floor < 1 for row in rows)


def test_the_cases_that_share_networks_are_neighbours():
    families = [case.family for case in load_cases().values()]
    changes = sum(before != after for before, after in itertools.pairwise(families))
    assert changes == len(set(families)) - 1
    assert list(load_cases()) == [
        *("training", "memory", "training-groups", "gsa-pytorch", "inference", "latency", "small-images"),
        *("start-up", "module", "scaling", "ceilings"),
    ]


def test_training_and_groups_make_the_convolutional_networks_once(monkeypatch):
    made = []

    def modes(make, setting, batch, size):
        made.append(make)
        return {"eager": lambda: None}

    monkeypatch.setattr(networks, "training_modes", modes)
    for name in ("training", "training-groups"):
        list(CASES[name].rows(TINY))
    assert len(made) == 5  # ours in three forms, and two others


def test_processes_share_what_is_to_be_compiled(monkeypatch):
    """Each network is made by one of them, and once."""
    made = []

    def modes(make, setting, batch, size):
        network = (make.func, make.args, *sorted(make.keywords.items())) if isinstance(make, partial) else make
        made.append((network, batch))
        return {"compiled": lambda: None, "compiled, CUDA graph": Graphed(lambda: pytest.fail("not captured"))}

    monkeypatch.setattr(networks, "training_modes", modes)
    monkeypatch.setattr(networks, "load_gsa_pytorch", lambda: None)
    cases = [CASES[name] for name in ("training", "training-groups", "gsa-pytorch", "small-images")]
    for number in range(3):
        before = len(made)
        monkeypatch.setattr(measuring, "share", measuring.Share(number, 3))
        runner.compile_share(cases, replace(TINY, batch=8, graphs=True))
        assert len(made) - before in (3, 4)
    # Ours in three forms, two others, gsa-pytorch in two batches, and three for small images.
    assert len(made) == len(set(made)) == 10


def throughput(ours, theirs, target=None):
    return Row("Training", "images/s", {"a": ours, "b": theirs}, "a", "higher", target)


def test_ratios_and_goals():
    target = Target(0.71, 1.0)
    assert throughput(75.0, 100.0).ratio == 0.75
    assert throughput(75.0, 100.0).met(judged=True) is None
    verdicts = {0.70: "neither", 0.71: "neither", 0.75: "must beat", 1.0: "goal", 1.3: "goal"}
    for ratio, verdict in verdicts.items():
        assert throughput(ratio, 1.0, target).met(judged=True) == verdict
    for ratio, verdict in {1.5: "neither", 1.4: "neither", 1.2: "must beat", 1.0: "goal", 0.8: "goal"}.items():
        row = Row("Latency", "ms", {"a": ratio, "b": 1.0}, "a", "lower", Target(1.4, 1.0))
        assert row.met(judged=True) == verdict
    for seconds, verdict in {11.0: "neither", 7.0: "must beat", 4.0: "goal"}.items():
        row = Row("Start-up", "s", {"a": seconds}, "a", "lower", Target(10.0, 5.0, of="value"))
        assert row.ratio is None
        assert row.met(judged=True) == verdict
    failed = Row("Training", "images/s", {"b": 1.0}, "a", "higher", target, errors={"a": "out of memory"})
    assert failed.ratio is None
    assert failed.met(judged=True) is None
    several = Row("Module", "ms", {"a": 2.0, "b": 4.0, "c": 3.0}, "a", "lower", floors={"bytes": 0.5})
    assert several.rival == "c"
    assert several.ratio == 2 / 3
    assert several.fraction_of_floor == 0.25


def test_the_fastest_mode_of_each_side_counts(monkeypatch):
    times = {"a, slow": 4.0, "a, fast": 2.0, "b, only": 1.0}

    def fake(sides, device, seconds, fail, prepare):
        assert list(sides) == [*times, "b, broken"]
        fail("b, broken", RuntimeError("no such kernel\nand a page more"))
        return times

    def absent():
        raise SkippedError("not installed")

    monkeypatch.setattr(measuring, "milliseconds", fake)
    nothing = dict.fromkeys(["slow", "fast"], lambda: None)
    sides = {"a": lambda: nothing, "b": lambda: {"only": absent, "broken": absent}, "c": absent}
    found = measure(sides, Setting())
    assert found.times == {"a": 2.0, "b": 1.0}
    assert found.modes == {"a": "fast", "b": "only"}
    assert found.errors == {"c": "not installed", "b, broken": "no such kernel"}
    assert Measured({"a": 2.0}).per_second({"a": 256}) == {"a": 128_000.0}
    part = found.only("b")
    assert (part.times, part.modes) == ({"b": 1.0}, {"b": "only"})
    assert part.errors == {"b, broken": "no such kernel"}


def test_a_cpu_tries_networks_as_they_are_too():
    model = nn.Identity()
    for setting, modes in ((Setting(), ["eager"]), (Setting(compiled=True), ["compiled", "eager"])):
        assert list(measuring.compiled_modes(model, setting)) == modes
    assert list(measuring.compiled_modes(model, Setting(device="cuda", compiled=True))) == ["compiled"]


def test_a_side_that_fails_is_reported_and_the_other_is_measured():
    def broken():
        raise torch.OutOfMemoryError("no room")

    found = measure({"a": lambda: {"eager": broken}, "b": lambda: {"eager": lambda: None}}, TINY)
    assert found.errors == {"a, eager": "out of memory"}
    assert list(found.times) == ["b"]


def fake_cases(monkeypatch, **cases):
    load_cases()
    monkeypatch.setattr("registry.CASES", {})
    import registry

    for name, rows in cases.items():
        registry.CASES[name] = Case(name, name, rows)
    for module in ("report", "run"):
        monkeypatch.setattr(f"{module}.load_cases", lambda: registry.CASES)


def test_the_file_is_written_after_each_row_and_the_rest_goes_on(monkeypatch, tmp_path):
    file = tmp_path / "new" / "speed.json"
    seen = []

    def good(setting):
        """Two rows."""
        yield throughput(1.0, 2.0, Target(0.4, 1.0))
        seen.append(len(read_report(file)["rows"]))
        yield throughput(3.0, 2.0)
        raise RuntimeError("broken\nat the end")

    def skipped(setting):
        """None."""
        seen.append(len(read_report(file)["rows"]))
        raise SkippedError("needs a GPU")
        yield

    fake_cases(monkeypatch, good=good, skipped=skipped)
    console = Console(file=io.StringIO(), width=120, soft_wrap=True)
    setting = Setting(judged=True)
    report = Report(FACTS, setting.as_json(), file)
    runner.run_cases(["skipped", "good"], setting, report, console)
    runner.show(report, console)
    assert seen == [1, 2]
    content = read_report(file)
    assert [row["ratio"] for row in content["rows"]] == [0.5, 1.5]
    assert [row["met"] for row in content["rows"]] == ["must beat", None]
    assert content["skipped"] == {"good": "failed: broken", "skipped": "needs a GPU"}
    assert content["dtype"] == "float32"
    text = console.file.getvalue()
    assert "Training: a 1 images/s; b 2 images/s; ratio 0.50; meets must beat" in text
    assert "good, Training: b, ours / theirs 0.50" in text
    assert "not run, skipped: needs a GPU" in text

    again = Report(FACTS, setting.as_json(), file)  # the same machine and setting: the other cases' rows stay
    again.begin("skipped")
    again.add(throughput(1.0, 1.0).as_json("skipped", True))
    assert [row["case"] for row in read_report(file)["rows"]] == ["good", "good", "skipped"]
    other = Report(FACTS | {"commit": "def"}, setting.as_json(), file)
    assert other.dropped
    assert not other.rows
    table = markdown(content)
    assert "| Training | a 1 images/s, b 2 images/s | 0.50 | 0.4 ✓ | ≥ 1 ✗ |" in table
    assert "- good, Training: b, ours / theirs 0.50" in table


def test_a_file_that_is_something_else_is_refused(tmp_path):
    file = tmp_path / "speed.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"speed\.json: must be an object of environment, "):
        read_report(file)
    report = Report(FACTS, Setting().as_json(), tmp_path / "new.json")
    report.add({**throughput(1.0, 2.0).as_json("training", False)})
    content = json.loads((tmp_path / "new.json").read_text())
    for change, words in {"case": "there is no case 'nothing'", "extra": "a row must have case, "}.items():
        file.write_text(json.dumps({**content, "rows": [{**content["rows"][0], change: "nothing"}]}))
        with pytest.raises(ValueError, match=words):
            read_report(file)


def test_the_files_of_results_can_be_read():
    assert default_file(FACTS) == ROOT / "results" / "benchmarks" / "speed-h200.json"
    for file in (ROOT / "results" / "benchmarks").glob("speed-*.json"):
        content = read_report(file)
        assert content["rows"]
        assert list(tables(content["rows"]))
        assert all(row_line(row) for row in content["rows"])
        assert isinstance(losses(content["rows"]), list)


@pytest.fixture
def content():
    """As an H200 might give."""
    report = Report(FACTS, Setting(dtype=torch.bfloat16).as_json())
    report.add(throughput(5000.0, 6500.0, Target(0.71, 1.0)).as_json("training", True))
    report.add(Row("Latency", "ms", {"a": 0.5, "b": 0.6}, "a", "lower", Target(1.4, 1.0)).as_json("latency", True))
    for what in ("8x8x16, forward", "8x8x16, forward + backward", "4x4x32, forward"):
        sides = {"gsanet": 2.0, "reference": 5.0}
        row = Row(what, "ms", sides, "gsanet", "lower", floors={"bytes": 1.0})
        report.add(row.as_json("module", True))
    for size in (14, 28):
        for unit in ("ms/image", "MiB/image"):
            row = Row(f"{size}x{size}, it", unit, {"gsanet": size**2, "softmax attention": size**4}, "gsanet", "lower")
            report.add(row.as_json("scaling", True))
    return report.as_json()


def test_picture(content, tmp_path):
    from picture import draw

    draw([content], tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    for case in ("training", "module", "scaling"):
        only = {**content, "rows": [row for row in content["rows"] if row["case"] == case]}
        draw([only], tmp_path / f"{case}.svg")
        assert "<svg" in (tmp_path / f"{case}.svg").read_text()
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([{**content, "rows": []}], tmp_path / "none.png")


def test_picture_of_what_was_measured_again(content, tmp_path, monkeypatch):
    import picture

    drawn = []
    monkeypatch.setattr(picture, "_scaling", lambda plot, rows, unit: drawn.append(rows))
    again = {**content, "rows": [row for row in content["rows"] if row["case"] == "scaling"][:1]}
    picture.draw([content, again], tmp_path / "both.png")
    assert drawn == [again["rows"]]


def test_command(tmp_path, capsys, monkeypatch):
    files = [tmp_path / name for name in ("speed.json", "speed.md", "speed.png")]
    json_file, markdown_file, picture_file = map(str, files)
    options = ["--device", "cpu", "--quick", "--batch", "1", "--commit", "abc", "--json", json_file]
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
    )
    runner.main(["scaling", "memory", *options, "--markdown", markdown_file, "--picture", picture_file])
    text = capsys.readouterr().out
    assert "drawing needs matplotlib" in text
    assert "commit abc" in text
    assert "skipped: needs a GPU" in text
    assert not files[2].exists()
    content = read_report(files[0])
    assert {row["case"] for row in content["rows"]} == {"scaling"}
    assert "| 4x4, time |" in files[1].read_text()
    with pytest.raises(SystemExit):
        runner.main(["nothing"])
    assert "unknown case nothing: the cases are training, memory" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["picture.py", json_file, picture_file])
    runpy.run_path(str(ROOT / "benchmarks" / "picture.py"), run_name="__main__")
    assert files[2].exists()


def test_folded_batch_norms_change_nothing():
    model = torchvision.models.resnet18(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    folded = fold_batch_norms(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert model.training
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(folded(x), model.eval()(x), rtol=1e-4, atol=1e-4)


def test_rivals_take_a_map():
    x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    y = SoftmaxAttention(16, 2)(x)
    assert y.shape == x.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    pytest.importorskip("gsa_pytorch")
    assert GsaPytorch(16, (8, 8), stride=2)(x).shape == (2, 16, 4, 4)


def test_softmax_attention_is_softmax_attention():
    module = SoftmaxAttention(4, 2)
    x = torch.randn(1, 4, 2, 3)
    q, k, v = module.qkv(x).flatten(2).unflatten(1, (3, 2, 2)).permute(1, 0, 2, 4, 3)  # b, head, pixel, channel
    out = (q @ k.mT / 2**0.5).softmax(-1) @ v
    torch.testing.assert_close(module(x), out.transpose(2, 3).reshape(1, 4, 2, 3))


def test_module_runs_prefer_their_backend_and_train_only_with_a_backward_pass():
    module = modules.gsanet.GlobalSelfAttention(16, feat_size=4)
    x = torch.randn(2, 16, 4, 4)
    for backward in (False, True):
        before = module.norm.running_mean.clone()
        modules.ModuleRun(module, x, torch.bfloat16, backward, "reference")()
        assert module.training == backward
        assert torch.equal(before, module.norm.running_mean) != backward
        assert all(parameter.grad is None for parameter in module.parameters())


def test_floor_of_one_module():
    """NOTES.md's example: 0.2 GB, and 44 GFLOP, at 56x56x64 and batch 256."""
    assert modules.byte_floor(256, 56, 64, 2, backward=False) == 2 * (2 * 256 * 56**2 * 64 + 3 * 64**2 + 2 * 111 * 8)
    assert modules.byte_floor(256, 56, 64, 2, backward=True) / 1e9 == pytest.approx(5 * 0.1028, rel=1e-3)
    assert modules.operations(256, 56, 64, backward=False) / 1e9 == pytest.approx(44, rel=0.02)
    assert modules.operations(256, 56, 64, backward=True) == 3 * modules.operations(256, 56, 64, backward=False)


def test_full_speed_is_the_first_call_as_fast_as_the_last():
    slow = [(0.0, 3.0), (3.0, 4.0), (4.0, 4.11)]
    steady = [(4.11 + 0.1 * number, 4.21 + 0.1 * number) for number in range(20)]
    assert full_speed([*slow, *steady]) == 4.11
    assert len(time_calls(lambda: None, 0.0)) == 20


def event(name, start, microseconds, **others):
    """One of the profiler's, as on a GPU."""
    time_range = SimpleNamespace(start=start, elapsed_us=lambda: microseconds)
    fields = {"device_type": DeviceType.CUDA, "is_user_annotation": False, "cpu_parent": None} | others
    return SimpleNamespace(name=name, time_range=time_range, **fields)


def test_kernels_of_a_step_are_told_apart():
    names = {
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn": "convolutions",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized_128x64>(Params)": "convolutions",
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": "matrix products",
        "triton_poi_fused__to_copy_convolution_relu_12": "Triton pointwise",
        "triton_red_fused__native_batch_norm_legit_functional_3": "Triton reductions",
        "line_forward": "our kernels",
        "norm_pool_gradient": "our kernels",
        "void cudnn::ops::nchwToNhwcKernel<float>(Params)": "copies",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<3>>(T1)": "optimizer",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)": "others of PyTorch",
    }
    events = [event(name, start, 10.0 * start) for start, name in enumerate(names, 1)]
    beside = [
        event("Optimizer.step#SGD.step", 5, 1e6, is_user_annotation=True),
        event("cudaGraphLaunch", 0, 1e6, device_type=DeviceType.CPU),
    ]
    found = profile_step.kernels_of([*reversed(events), *beside], Setting(device="cuda"))
    assert [kernel.name for kernel in found] == list(names)
    assert {kernel.name: kernel.kind for kernel in found} == names
    step = profile_step.Profile("net", "compiled, CUDA graph", 1.0, found)
    assert step.total == pytest.approx(0.66)
    assert step.sums(lambda kernel: kernel.kind)["copies"] == (2, pytest.approx(0.17))
    assert next(iter(step.sums(lambda kernel: kernel.kind))) == "copies"
    assert max(map(len, map(profile_step.short, names))) <= profile_step.WIDTH


def test_profile_of_a_step(tmp_path, capsys):
    file = tmp_path / "profile.json"
    options = ["--set", "depths=1,1", "--set", "width=0.125", "--img-size", "16", "--device", "cpu", "--steps", "2"]
    profile_step.main(["gsa_resnet26_tiny", *options, "--against", "resnet18", "--json", str(file)])
    printed = capsys.readouterr()
    assert "gsa_resnet26_tiny, depths=[1, 1], width=0.125: profiling 2 steps" in printed.err
    for words in ("in the order of launch", "by kernel", "by kind", "Side by side", "of the wall time of"):
        assert words in printed.out
    ours, theirs = json.loads(file.read_text())["profiles"]
    assert theirs["network"] == "resnet18"
    for each in (ours, theirs):
        kernels = each["kernels"]
        assert each["mode"] == "eager"
        assert each["wall_ms"] > 0
        assert each["kernels_ms"] == pytest.approx(sum(kernel["microseconds"] for kernel in kernels) / 1e3)
        assert sum(each["kinds_ms"].values()) == pytest.approx(each["kernels_ms"])
        names = [kernel["name"] for kernel in kernels]
        assert (
            names.index("aten::conv2d") < names.index("ConvolutionBackward0") < names.index("Optimizer.step#SGD.step")
        )
    assert ours["kinds_ms"]["our kernels"] > 0
    assert "our kernels" not in theirs["kinds_ms"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gsa_resnet5"], "unknown network 'gsa_resnet5': did you mean"),
        (["gsa_resnet50", "--batch", "0"], "--batch must be 1 or more, got 0"),
        (["gsa_resnet50", "--set", "groups"], "--set takes key=value"),
        (["gsa_resnet50", "--set", "grups=3,4"], "unknown option 'grups' of a network: did you mean 'groups'"),
        (["gsa_resnet50", "--set", "groups=3,5"], "groups must be among 1 to 4"),
        (["gsa_resnet50", "--json", "nowhere/profile.json"], "there is no folder nowhere"),
        (["gsa_resnet50", "--device", "cpu", "--graphs"], "--graphs needs a GPU"),
    ],
)
def test_profiles_that_cannot_be(arguments, words, capsys):
    with pytest.raises(SystemExit):
        profile_step.main(arguments)
    assert words in capsys.readouterr().err


class NotCaptured:
    """A network that is called, with what should differ between the sides."""

    edges = "3 of 9 edges"

    def __init__(self, network, x, early, streams):
        self.network, self.x, self.how = network, x, (early, streams)

    def __call__(self):
        self.out = self.network(self.x, *self.how)


@pytest.mark.parametrize("wrong", [None, (True, False)])
def test_early_launches_are_compared(monkeypatch, capsys, wrong):
    monkeypatch.setattr(launches, "Captured", NotCaptured)

    def network(x, *how):
        return x + 1 if wrong is not None and how == wrong else x

    launches.compare("a network", network, torch.zeros(3), TINY, 2)
    printed = capsys.readouterr().out
    assert printed.startswith("a network: usual ")
    assert all(f"{side} " in printed for side in launches.SIDES)
    assert printed.count("(3 of 9 edges)") == len(launches.SIDES) == 4
    assert printed.endswith(f"us; bits {'the same' if wrong is None else 'DIFFER'}\n")


@pytest.mark.parametrize(("status", "words"), [(0, "2 of 3 edges"), (1, "error 1")])
def test_edges_of_a_graph_are_counted(monkeypatch, status, words):
    def get(graph, before, behind, data, count):
        assert graph.value == 0x7F0012345678
        if data is None:
            count.contents.value = 3
            return 0
        assert len(before) == len(behind) == len(data) == count.contents.value
        for edge, kind in zip(data, (0, 1, 1), strict=True):
            edge.type = kind
        return status

    monkeypatch.setattr(launches, "driver", lambda: SimpleNamespace(cuGraphGetEdges_v2=get))
    assert launches.edges(0x7F0012345678) == words


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_early_launches_need_a_gpu(capsys):
    with pytest.raises(SystemExit):
        launches.main([])
    assert "early launches need a GPU" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_early_launches_give_the_same_bits_on_gpu(capsys):
    launches.main(["--seconds", "0.01"])
    printed = capsys.readouterr().out
    assert printed.count("bits the same") == 5
    assert "DIFFER" not in printed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_does_what_its_run_does():
    x = torch.zeros(4, device="cuda")
    graphed = Graphed(lambda: x.add_(1))
    graphed()
    graphed()
    assert x.tolist() == [5.0] * 4  # three before the capture, and two replays


def test_cuts_are_compared(monkeypatch, capsys):
    """By two matrix products in the place of the kernel, one of which is of another map."""
    monkeypatch.setattr(cuts, "Graphed", lambda run: run)
    monkeypatch.setattr(cuts, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cuts, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(cuts, "FLUSHED", 4)
    monkeypatch.setattr(cuts, "milliseconds", lambda sides, *_, **__: {name: len(name) / 1e3 for name in sides})
    planned = projection_gradients.TRIED[0]

    def by_kernel(d_out, x, weight, cut):
        d_x, d_weight = projection_gradients.in_two_products(d_out, x, weight)
        return d_x, d_weight if cut == planned else 2 * d_weight

    monkeypatch.setattr(projection_gradients, "by_kernel", by_kernel)
    for every in (False, True):
        projection_gradients.compare(200, every, device="cpu")
        first, *middle, end = capsys.readouterr().out.splitlines()
        assert first.startswith("200 pixels, 64 to 192 channels: 17 us by PyTorch, of x 4, of the weight 13; bytes")
        assert len(middle) == (len(projection_gradients.TRIED) if every else 1)
        assert sum(", as planned: rows 192, columns 64," in line for line in middle) == 1
        worst = float(re.search(r"of any cut, \S+, (\S+); two runs give the same bits: True", end)[1])
        assert (worst > 0.5) == every


def test_ends_of_blocks_are_compared(monkeypatch, capsys):
    monkeypatch.setattr(expansions, "Graphed", lambda run: run)
    setting = replace(TINY, dtype=torch.bfloat16)
    sides = ["layers", "expansion"]
    expansions.compare("an end", partial(expansions.EndStep, (2, 6, 8, 32), setting), "d_weight", setting, sides)
    # What is not compiled is the same on all sides.
    blocks = partial(expansions.BlocksStep, (1, 4, 0), setting)
    expansions.compare("blocks", blocks, "d_weight", setting, ["expansion", "sums", "entries"])
    network = partial(expansions.NetworkStep, "conv_resnet26", setting)
    expansions.compare("a network", network, "loss", setting, sides)
    end, both, whole = capsys.readouterr().out.splitlines()
    assert end.startswith("an end: layers ")
    assert all(words in end for words in (", expansion ", "times as fast, d_weight apart by "))
    assert 0 < float(re.search(r"apart by ([^)]+)\)", end)[1]) < 0.05
    assert both.count("d_weight apart by 0.0e+00") == 2
    assert "loss apart by 0.0e+00" in whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_ends_of_blocks_need_a_gpu(capsys):
    with pytest.raises(SystemExit):
        expansions.main([])
    assert "on a GPU" in capsys.readouterr().err
