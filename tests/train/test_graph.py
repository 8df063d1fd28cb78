"""A step as a CUDA graph; without a GPU a stand-in records the function, and runs it again when it is replayed."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gsanet.train import engine
from gsanet.train.engine import train
from gsanet.train.graph import GraphedStep


class StandIn:
    """As a graph does: several runs before, then one whose results' memory every replay writes to again."""

    def __init__(self, run):
        self.run = run
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
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def step_of(model):
    def compute(images, labels):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return compute


def test_gradients_and_statistics_are_those_of_each_batch():
    plain, graphed = network(), network()
    step = GraphedStep(graphed, step_of(graphed), StandIn)
    for number in range(3):
        images, labels = torch.randn(6, 3, 8, 8), torch.randint(5, (6,))
        plain.zero_grad()
        loss = step_of(plain)(images, labels)
        assert step(images, labels).item() == loss.item(), number
        for one, other in zip(plain.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        for one, other in zip(plain.buffers(), graphed.buffers(), strict=True):
            assert torch.equal(one, other)


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

        def recorded(run):
            state = torch.get_rng_state()
            graph = StandIn(run)
            torch.set_rng_state(state)
            return graph

        return (GraphedStep(model, compute, recorded) if recipe.cuda_graphs else None), ""

    monkeypatch.setattr(engine, "make_graph", make)


def test_a_run_with_graphs_is_the_same_run(tiny_recipe, tmp_path, stand_in):
    for name, graphs in {"plain": False, "graphed": True}.items():
        train(tiny_recipe(**OPTIONS, cuda_graphs=graphs), tmp_path / name)
    check_same(tmp_path / "plain", tmp_path / "graphed")


def test_a_run_with_graphs_goes_on_where_it_stopped(tiny_recipe, tmp_path, stand_in):
    recipe = tiny_recipe(**OPTIONS, cuda_graphs=True, checkpoint_steps=3)
    train(recipe, tmp_path / "whole")
    stopped = train(recipe, tmp_path / "cut", stop_after=0.0)
    assert stopped.stopped_by
    train(recipe, tmp_path / "cut", resume=True)
    check_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_with_graphs_on_a_gpu(tiny_recipe, tmp_path):
    for name, graphs in {"plain": False, "graphed": True}.items():
        train(tiny_recipe(**OPTIONS, cuda_graphs=graphs, precision="fp32"), tmp_path / name)
    one, other = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("plain", "graphed"))
    for name, weights in one.items():
        torch.testing.assert_close(other[name], weights, rtol=1e-2, atol=1e-3)


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
    assert engine.make_graph(tiny_recipe(cuda_graphs=True), network(), 1, Accelerator(), None) == (None, "")


def check_same(one, other):
    for file in ("model", "ema", "optimizer"):
        expected, found = (load_file(run / "last" / f"{file}.safetensors") for run in (one, other))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (file, name)
