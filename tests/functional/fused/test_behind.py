"""Attention that takes the statistics of the batch norm behind it: against the layers in float64."""

import copy

import pytest
import torch
from functional.fused.test_expansion import LAST, compiled_steps, network
from functional.fused.test_kernels import BF16, FLOAT, TOLERANCE, make_module, normal, step
from functional.fused.test_norms import train_step
from helpers import relative_error
from torch import fx, nn

from gsanet.functional import use_backend
from gsanet.layers import residual_block


class Layers(nn.Module):
    """A module and the norm behind it; `together`: as one."""

    def __init__(self, attention, together=False, **options):
        super().__init__()
        self.attention, self.norm, self.together = attention, nn.BatchNorm2d(attention.dim_out, **options), together
        if self.norm.affine:
            nn.init.normal_(self.norm.weight), nn.init.normal_(self.norm.bias)
        if self.norm.track_running_stats:
            self.norm.running_mean.normal_(0.0, 0.2)

    def forward(self, x):
        """From one map to another."""
        if not self.together:
            return self.norm(self.attention(x))
        normed = self.attention.normed(x, self.norm)
        assert normed is not None
        return normed


CASES = {
    "plain": ({}, {}),
    "pooled": ({"stride": 2}, {}),
    "without content": ({"content": False}, {"momentum": None}),
    "wider": ({"dim_out": 128}, {"eps": 1e-2}),
    "without weights": ({}, {"affine": False}),
    "without running statistics": ({}, {"track_running_stats": False}),
}


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_statistics(kernels, case, dtype):
    options, of_norm = CASES[case]
    layers = Layers(make_module(dtype, 64, (8, 6), whole=False, **options), **of_norm).to(kernels.device).train()
    x = normal(2, 64, 8, 6, dtype=dtype).to(kernels.device, memory_format=LAST)
    exact = copy.deepcopy(layers).double()
    with use_backend("reference"), torch.no_grad():
        d_out = normal(*copy.deepcopy(exact)(x.double()).shape, dtype=FLOAT, seed=3).to(kernels.device)
    with use_backend("reference"):
        expected = step(exact, x.double(), d_out)
    layers.together = True
    with kernels.running():
        found = step(layers, x, d_out)
    assert "channel_sums" not in kernels.entries
    rows = [one for one in kernels.constants("line_forward") if one["NORM_VALUES"]]
    assert rows
    assert all(one["STATISTICS"] for one in rows)
    for name, value in expected.items():
        # A norm behind another one: a sum that it takes away is nothing but rounding.
        slack = 3e-3 if "norm.bias" in name else 0.0
        assert relative_error(found[name], value) < 5 * TOLERANCE[dtype] + slack, name


def count(graphs, operator):
    (graph,) = graphs
    nodes = [node for module in graph.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes]
    return sum(f"gsanet.{operator}.default" in str(node.target) for node in nodes)


@pytest.fixture
def wanted(kernels, monkeypatch):
    monkeypatch.setattr(residual_block, "statistics_wanted", True)
    return kernels


def test_compiled_network(wanted):
    """Two modules with a stride of 1, one with 2: outputs, gradients and statistics are the plain ones."""
    model = network("gsa_resnet26", widths=(64, 64)).to(wanted.device)
    exact = copy.deepcopy(model).double()
    x = normal(4, 3, 32, 32, dtype=FLOAT).to(wanted.device, memory_format=LAST)
    with use_backend("reference"):
        expected = train_step(exact, x.double())
    with compiled_steps(wanted, model) as (compiled, graphs):
        found = train_step(compiled, x)
    # Three blocks have three norms each, two a shortcut's.
    assert count(graphs, "channel_statistics") == 3 * 2 + 2
    for key, value in expected.items():
        own = found[key if key == "output" else f"_orig_mod.{key}"]
        assert relative_error(own, value) < 2e-4, key


def count_statistics(kernels, model):
    x = normal(4, 3, 32, 32, dtype=FLOAT).to(kernels.device, memory_format=LAST)
    with compiled_steps(kernels, model.to(kernels.device)) as (compiled, graphs):
        compiled(x)
    return count(graphs, "channel_statistics")


def test_where_layers_stay_as_they_are(wanted, monkeypatch):
    assert count_statistics(wanted, network("gsa_resnet26", widths=(64, 64), row=False)) == 11
    hooked = network("gsa_resnet26", widths=(64, 64))
    hooked.stages[0][0].self_attn.register_forward_hook(lambda *arguments: None)
    hooked.stages[0][1].post_attn.register_forward_hook(lambda *arguments: None)
    assert count_statistics(wanted, hooked) == 10
    frozen = network("gsa_resnet26", widths=(64, 64))
    frozen.stages[1][0].post_attn.eval()
    assert count_statistics(wanted, frozen) == 8  # that norm has no use for any
    monkeypatch.setattr(residual_block, "statistics_wanted", False)
    assert count_statistics(wanted, network("gsa_resnet26", widths=(64, 64))) == 11


def test_what_backends_refuse(kernels):
    attention, norm = make_module(FLOAT, 64, (8, 6)).train(), nn.BatchNorm2d(64)
    x = normal(2, 64, 8, 6, dtype=FLOAT).to(memory_format=LAST)
    for name in ("torch", "reference", "native"):
        with use_backend(name):
            assert attention.normed(x, norm) is None
    x, attention, norm = x.to(kernels.device), attention.to(kernels.device), norm.to(kernels.device)
    with kernels.running(poison=False):
        assert attention.normed(x, norm) is not None
        assert attention.normed(x, nn.BatchNorm2d(32).to(kernels.device)) is None
        assert attention.normed(x, norm.eval()) is None
        attention.qkv.register_forward_hook(lambda *arguments: None)
        assert attention.normed(x, norm.train()) is None


# --- On a GPU.


def test_network_on_gpu(gpu, monkeypatch):
    """As far from float64 as the network without it is."""
    model = network("gsa_resnet26", widths=(64, 64)).cuda().to(memory_format=LAST)
    x = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=LAST)
    with use_backend("reference"):
        expected = train_step(copy.deepcopy(model).double(), x.double())
    errors = []
    for on in (True, False):
        monkeypatch.setattr(residual_block, "statistics_wanted", on)
        torch._dynamo.reset()
        gpu.launched.clear()
        with gpu.running(poison=False), torch.autocast("cuda", BF16):
            found = train_step(torch.compile(copy.deepcopy(model), fullgraph=True), x)
        assert any(one["STATISTICS"] and one["NORM_VALUES"] for one in gpu.constants("line_forward")) == on
        errors.append({key: relative_error(found[f"_orig_mod.{key}"], expected[key]) for key in expected if "." in key})
    torch._dynamo.reset()
    own, usual = (torch.tensor(list(one.values())) for one in errors)
    assert own.nanmedian() < 1.2 * usual.nanmedian()
    assert (own.nan_to_num() < 2 * usual.nan_to_num() + 0.02).all()
