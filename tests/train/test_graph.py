"""A step as a CUDA graph; a stand-in, which needs no GPU, records the function and runs it again when it is replayed.

The stand-in computes what a step without it computes, so on any device the same bits are asked of both, on a GPU with
deterministic algorithms. A real graph may be given other kernels, so it is asked to agree within a tolerance, which is
far below what the runs before its capture would change if they left a trace.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gsanet.train import engine
from gsanet.train.engine import train
from gsanet.train.graph import Graph, GraphedStep

# cuBLAS asks for a setting of the environment, which matters where several streams compute at once: none do.
pytestmark = pytest.mark.filterwarnings("ignore:.*[Dd]eterministic")


class StandIn:
    """As a graph does: several runs before, then one whose results' memory every replay writes to again."""

    def __init__(self, run):
        self.run = run
        # Dropout draws random numbers where the images are, which may be a GPU.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for _ in range(3):
                run()
            self.result = run()
        network = run.__self__.network
        self.gradients = {name: parameter.grad for name, parameter in network.named_parameters()}

    def replay(self):
        network = self.run.__self__.network
        result = self.run()
        self.result.copy_(result)
        for name, parameter in network.named_parameters():
            self.gradients[name].copy_(parameter.grad)
            parameter.grad = self.gradients[name]


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 5)
    return nn.Sequential(*layers)


def step_of(model):
    def compute(images, labels):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return compute


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("make_graph", "device", "tolerance"),
    [
        pytest.param(StandIn, "cpu", 0.0, id="stand-in"),
        pytest.param(Graph, "cuda", 1e-9, id="graph", marks=needs_gpu),  # of float64, whose rounding is at 1e-16
    ],
)
def test_gradients_statistics_and_random_numbers_are_those_of_each_batch(make_graph, device, tolerance):
    plain, graphed = (network().double().to(device) for _ in range(2))
    same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    step = GraphedStep(graphed, step_of(graphed), make_graph)
    for number in range(3):
        images = torch.randn(6, 3, 8, 8, dtype=torch.float64, device=device)
        labels = torch.randint(5, (6,), device=device)
        plain.zero_grad()
        torch.manual_seed(number)
        loss = step_of(plain)(images, labels)
        torch.manual_seed(number)
        same(step(images, labels), loss.detach())
        for one, other in zip(plain.parameters(), graphed.parameters(), strict=True):
            same(other.grad, one.grad)
        for one, other in zip(plain.buffers(), graphed.buffers(), strict=True):
            same(other, one)


def test_a_loss_is_not_written_over_by_the_next_step():
    model = network()
    step = GraphedStep(model, step_of(model), StandIn)
    labels = torch.randint(5, (6,))
    first = step(torch.randn(6, 3, 8, 8), labels)
    before = first.item()
    step(torch.randn(6, 3, 8, 8), labels)
    assert first.item() == before


def test_a_batch_of_another_shape_is_refused():
    model = network()
    step = GraphedStep(model, step_of(model), StandIn)
    step(torch.randn(6, 3, 8, 8), torch.randint(5, (6,)))
    with pytest.raises(ValueError, match=r"batches of one shape, \(6, 3, 8, 8\), not \(4, 3, 8, 8\)"):
        step(torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))


OPTIONS = {"epochs": 2, "mixup": 0.2, "clip_grad": 1.0, "ema": 0.9, "model_kwargs.drop_path_rate": 0.1}


@pytest.fixture
def stand_in(monkeypatch):
    """Steps through the stand-in, whatever the device."""

    def make(recipe, model, micro_steps, accelerator, mix):
        def compute(images, labels):
            return engine.differentiate(model, recipe, micro_steps, accelerator, mix, images, labels)

        return (GraphedStep(model, compute, StandIn) if recipe.cuda_graphs else None), ""

    monkeypatch.setattr(engine, "make_graph", make)


@pytest.fixture
def _deterministic():
    """On a GPU, no algorithm that adds up in an order left to chance, and none chosen by how long it takes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_algorithms_are_chosen_by_their_time_unless_torch_is_deterministic(tiny_recipe, monkeypatch, deterministic):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # put back at the end
    monkeypatch.setattr(engine, "Accelerator", lambda **options: None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    engine.make_accelerator(tiny_recipe())
    assert torch.backends.cudnn.benchmark is not deterministic
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_deterministic")
def test_a_run_with_graphs_is_the_same_run(tiny_recipe, tmp_path, stand_in):
    for name, graphs in {"plain": False, "graphed": True}.items():
        train(tiny_recipe(**OPTIONS, cuda_graphs=graphs), tmp_path / name)
    check_same(tmp_path / "plain", tmp_path / "graphed")


@pytest.mark.usefixtures("_deterministic")
def test_a_run_with_graphs_goes_on_where_it_stopped(tiny_recipe, tmp_path, stand_in):
    recipe = tiny_recipe(**OPTIONS, cuda_graphs=True, checkpoint_steps=3)
    train(recipe, tmp_path / "whole")
    stopped = train(recipe, tmp_path / "cut", stop_after=0.0)
    assert stopped.stopped_by
    train(recipe, tmp_path / "cut", resume=True)
    check_same(tmp_path / "whole", tmp_path / "cut")


@needs_gpu
@pytest.mark.usefixtures("_deterministic")
def test_a_run_with_graphs_on_a_gpu(tiny_recipe, tmp_path):
    """Over a few steps: in a longer run differences of rounding grow."""
    options = {**OPTIONS, "epochs": None, "steps": 4, "precision": "fp32"}
    for name, graphs in {"plain": False, "graphed": True}.items():
        train(tiny_recipe(**options, cuda_graphs=graphs), tmp_path / name)
    check_close(tmp_path / "plain", tmp_path / "graphed")


@pytest.mark.usefixtures("_deterministic")
def test_statistics_of_runs_before_the_capture_would_show_on_a_gpu(tiny_recipe, tmp_path, stand_in, monkeypatch):
    options = {**OPTIONS, "epochs": None, "steps": 4}
    train(tiny_recipe(**options), tmp_path / "plain")
    train(tiny_recipe(**options, cuda_graphs=True), tmp_path / "graphed")
    check_close(tmp_path / "plain", tmp_path / "graphed")
    monkeypatch.setattr(GraphedStep, "_capture", lambda step: step.make_graph(step._run))
    train(tiny_recipe(**options, cuda_graphs=True), tmp_path / "bad")
    with pytest.raises(AssertionError, match="model"):
        check_close(tmp_path / "plain", tmp_path / "bad")


def test_graphs_are_for_one_gpu_that_takes_a_batch_at_once(tiny_recipe):
    class Accelerator:
        device, num_processes = torch.device("cuda"), 2

    graph, why = engine.make_graph(tiny_recipe(cuda_graphs=True), network(), 1, Accelerator(), None)
    assert graph is None
    assert "one GPU" in why
    Accelerator.num_processes = 1
    assert isinstance(
        engine.make_graph(tiny_recipe(cuda_graphs=True), network(), 1, Accelerator(), None)[0], GraphedStep
    )
    Accelerator.device = torch.device("cpu")
    graph, why = engine.make_graph(tiny_recipe(cuda_graphs=True), network(), 1, Accelerator(), None)
    assert graph is None
    assert why == "cuda_graphs needs a GPU with CUDA: it is not used on cpu"
    assert engine.make_graph(tiny_recipe(), network(), 1, Accelerator(), None) == (None, "")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_a_run_says_that_graphs_are_not_used(tiny_recipe, tmp_path, capsys):
    train(tiny_recipe(steps=1, cuda_graphs=True), tmp_path / "run")
    assert capsys.readouterr().out.count("cuda_graphs needs a GPU with CUDA: it is not used on cpu\n") == 1


def check_same(one, other):
    for file in ("model", "ema", "optimizer"):
        expected, found = (load_file(run / "last" / f"{file}.safetensors") for run in (one, other))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (file, name)


def check_close(one, other):
    """Each file as a whole within a hundredth of its size; what is counted, the same."""
    for file in ("model", "ema", "optimizer"):
        expected, found = (load_file(run / "last" / f"{file}.safetensors") for run in (one, other))
        assert expected.keys() == found.keys()
        difference = size = 0.0
        for name, tensor in expected.items():
            if tensor.is_floating_point():
                difference += (found[name].double() - tensor.double()).square().sum().item()
                size += tensor.double().square().sum().item()
            else:
                assert torch.equal(found[name], tensor), (file, name)
        assert difference <= 1e-4 * size, (file, difference, size)
