"""The kernels of a module are compiled together before its first launch: those that it launches then, and no others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gsanet
from gsanet.functional import fused
from gsanet.functional.backends import BACKENDS
from gsanet.functional.fused import axis_ops, module_ops
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.compiler import Specialisation


def train(network, x):
    network.train()(x).sum().backward()


def evaluate(network, x):
    network.eval()(x)


def infer(network, x):
    with torch.inference_mode():
        gsanet.fuse_for_inference(network)(x)


@pytest.fixture
def compiled(monkeypatch) -> list[set[Specialisation]]:
    """The kernels of each call that compiles ahead, as on a GPU, whatever the backend would refuse."""
    ahead, found = module_ops._compile_ahead.__wrapped__, []
    on_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(module_ops, "_compile_ahead", lambda run, device, *rest: ahead(run, on_gpu, *rest))
    monkeypatch.setattr(launching, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(launching, "compile_all", lambda kernels, architecture: found.append(set(kernels)))
    takes_all = replace(fused.BACKEND, refuses=lambda *arguments, **settings: None)
    monkeypatch.setitem(BACKENDS, "fused", takes_all)
    return found


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"content": False}], ids=str)
@pytest.mark.parametrize("behind", [[], [nn.BatchNorm2d, nn.ReLU]], ids=["alone", "with a norm and a ReLU"])
@pytest.mark.parametrize("use", [train, evaluate, infer])
def test_what_is_compiled_is_what_is_launched(planned, compiled, use, behind, options):
    norms = [kind(64) if kind is nn.BatchNorm2d else kind() for kind in behind]
    network = nn.Sequential(gsanet.GlobalSelfAttention(64, feat_size=(8, 6), **options), *norms)
    x = torch.randn(2, 64, 8, 6).to(memory_format=torch.channels_last)
    with planned.running(poison=False):
        use(network, x)
    assert compiled == [{plan.kernel for plan in planned.launched}]
    assert ("line_backward" in planned.entries) == (use is train)


@pytest.mark.parametrize("use", [train, evaluate, infer])
def test_the_projection_on_chip_is_compiled_with_the_others(planned, compiled, use):
    planned.machine = replace(planned.machine, multiprocessors=1)
    network = nn.Sequential(gsanet.GlobalSelfAttention(64, feat_size=(16, 16))).to(torch.bfloat16)
    network[0].norm.float()  # as it is under autocast
    x = torch.randn(2, 64, 16, 16).to(torch.bfloat16, memory_format=torch.channels_last)
    with planned.running(poison=False):
        use(network, x)
    assert compiled == [{plan.kernel for plan in planned.launched}]
    assert "project_with_context" in planned.entries


@pytest.mark.parametrize("options", [{"row": False}, {"column": False, "stride": 2}], ids=str)
def test_what_is_compiled_for_one_axis_is_what_is_launched(planned, monkeypatch, options):
    """The gradient's kernels by themselves: here no norm says whether a module is trained."""
    prepare, compiled = axis_ops._prepare, []
    monkeypatch.setattr(axis_ops, "_prepare", lambda device, *rest: prepare(torch.device("cuda", 0), *rest))
    monkeypatch.setattr(launching, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(launching, "compile_all", lambda kernels, architecture: compiled.append(set(kernels)))
    network = nn.Sequential(gsanet.GlobalSelfAttention(64, feat_size=(8, 6), **options))
    x = torch.randn(2, 64, 8, 6).to(memory_format=torch.channels_last)
    axis_ops._compile_ahead.cache_clear()
    with planned.running(poison=False):
        train(network, x)
        train(network, x)
        assert [{kernel.entry for kernel in kernels} for kernels in compiled] == [
            {"context_partial", "line_forward"},
            {"context_partial", "line_backward", "table_gradient"},
        ]
        assert set.union(*compiled) == {plan.kernel for plan in planned.launched}
        infer(nn.Sequential(*network, nn.BatchNorm2d(64), nn.ReLU()), x)
    assert len(compiled) == 3  # with another kernel, which has the norm and the ReLU
    assert compiled[2] == {plan.kernel for plan in planned.launched[-2:]}
