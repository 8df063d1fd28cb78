"""1x1 convolutions in inference on a CPU: against float64, and what goes to PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functional.native.test_native import threads
from helpers import relative_error
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gsanet
from gsanet.functional import use_backend
from gsanet.functional.convolution import convolution_relu, pointwise_convolution
from gsanet.functional.native import calls, pointwise

pytestmark = pytest.mark.usefixtures("kernels")

ROUNDING = 2e-6
# Batch, channels, height and width, channels out, stride.
SHAPES = [
    ((2, 64, 7, 7), 96, 1),
    ((1, 33, 5, 9), 130, 1),
    ((3, 100, 9, 6), 45, 2),
    ((1, 513, 1, 1), 32, 1),
    ((2, 72, 11, 4), 1000, 3),
    ((1, 80, 40, 61), 64, 1),  # more pixels than are packed at a time
]


@pytest.fixture
def called(monkeypatch):
    """How often the kernel is called; it takes any number of pixels and of weights."""
    monkeypatch.setattr(pointwise, "MOST_PIXELS", 10**6)
    monkeypatch.setattr(pointwise, "FEWEST_WEIGHTS", 1)
    calls_seen = []
    real = calls.convolve_pointwise
    monkeypatch.setattr(calls, "convolve_pointwise", lambda *a, **k: calls_seen.append(1) or real(*a, **k))
    return calls_seen


def make(shape, outputs, stride, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    x = draw(*shape).to(memory_format=torch.channels_last)
    residual = draw(shape[0], outputs, -(-shape[2] // stride), -(-shape[3] // stride))
    return x, draw(outputs, shape[1], 1, 1), draw(outputs), residual.to(memory_format=torch.channels_last)


def in_double(x, weight, bias, residual, stride, relu):
    out = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), stride)
    out = out if residual is None else out + residual.double()
    return out.relu() if relu else out


@pytest.mark.parametrize(("shape", "outputs", "stride"), SHAPES)
def test_against_float64(shape, outputs, stride, called):
    x, weight, bias, residual = make(shape, outputs, stride)
    for added in (None, residual):
        out = convolution_relu(x, weight, bias, added, (stride, stride))
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert relative_error(out, in_double(x, weight, bias, added, stride, True)) < ROUNDING
    for offset in (None, bias):
        out = pointwise_convolution(x, weight, offset, (stride, stride))
        assert relative_error(out, in_double(x, weight, offset, None, stride, False)) < ROUNDING
    assert len(called) == 4


@pytest.mark.parametrize("change", [
    lambda one: one.contiguous(),
    lambda one: one.transpose(2, 3).contiguous().transpose(2, 3),
    lambda one: one.repeat_interleave(2, dim=1)[:, ::2],
    lambda one: F.pad(one, (1, 2, 3, 0))[:, :, 3:, 1:-2],
    lambda one: one[:1].expand(2, -1, -1, -1),
])  # fmt: skip
def test_any_strides(change, called):
    x, weight, bias, residual = make((2, 40, 6, 5), 50, 1)
    x, residual = change(x), change(residual)
    wide = weight.repeat_interleave(2, dim=1)[:, ::2]
    out = convolution_relu(x, wide, bias.repeat(2)[:50], residual)
    assert relative_error(out, in_double(x, weight, bias, residual, 1, True)) < ROUNDING
    assert called


def test_two_runs_and_any_number_of_threads_give_the_same_bits(called):
    operands = make((2, 96, 13, 17), 200, 1)
    found = convolution_relu(*operands)
    for count in (1, 2, 5):
        with threads(count):
            assert torch.equal(convolution_relu(*operands), found)
    assert len(called) == 4


def test_what_is_not_a_number_stays_so(called):
    x, weight, bias, residual = make((1, 64, 4, 4), 64, 1)
    x[0, 3, 2, 1] = float("nan")
    residual[0, 5, 0, 0] = float("nan")
    out = convolution_relu(x, weight, bias, residual)
    expected = F.conv2d(x, weight, bias).add(residual).relu()
    assert torch.equal(out.isnan(), expected.isnan())
    assert called


def test_what_goes_to_pytorch(called):
    x, weight, bias, residual = make((2, 64, 6, 6), 64, 1)
    spatial = torch.randn(64, 64, 3, 3)
    with pytest.raises(RuntimeError, match="channels"):
        convolution_relu(x, weight[:, :8], bias)
    convolution_relu(x, spatial, bias, None, (1, 1), (1, 1))
    convolution_relu(x, weight, bias, None, (1, 1), (1, 1))  # zeros around the map
    convolution_relu(x, weight, bias, residual[:, :, :1, :1])  # spread over the map
    convolution_relu(x[:0], weight, bias)
    convolution_relu(x.double(), weight.double(), bias.double())
    with use_backend("torch"):
        convolution_relu(x, weight, bias)
    with FlopCounterMode(display=False) as counter:
        convolution_relu(x, weight, bias)
    assert counter.get_total_flops() == 2 * 72 * 64 * 64
    leaf = x.clone().requires_grad_()
    convolution_relu(leaf, weight, bias).sum().backward()
    assert leaf.grad is not None
    torch.func.vmap(lambda one: convolution_relu(one, weight, bias))(x[None])
    assert not called
    with torch.no_grad():
        convolution_relu(leaf, weight, bias)
    assert called


def test_few_pixels_with_several_threads_and_all_with_one(called, monkeypatch):
    monkeypatch.setattr(pointwise, "MOST_PIXELS", 50)
    x, weight, bias, _ = make((2, 64, 6, 6), 64, 1)
    with threads(2):
        convolution_relu(x, weight, bias)
        assert not called
        convolution_relu(x[:1], weight, bias)
        assert len(called) == 1
    with threads(1):
        convolution_relu(x, weight, bias)
        assert len(called) == 2


def test_many_pixels_where_onednn_is_not_there(called, monkeypatch):
    """As for bfloat16 on a machine without instructions for it."""
    monkeypatch.setattr(pointwise, "MOST_PIXELS", 50)
    monkeypatch.setattr(pointwise, "has_onednn", lambda dtype: dtype == torch.float32)
    x, weight, bias, _ = make((2, 64, 6, 6), 64, 1)
    with threads(2):
        convolution_relu(x, weight, bias)
        assert not called
        found = convolution_relu(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert len(called) == 1
    assert relative_error(found, in_double(x, weight, bias, None, 1, True)) < 1e-2


def test_fused_networks_compiled_exported_and_as_they_are(called):
    torch.manual_seed(0)
    model = gsanet.create_model("gsa_resnet26", depths=(1, 1), widths=(32, 64), img_size=32, num_classes=7).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    fused = gsanet.fuse_for_inference(model)
    with torch.no_grad():
        with use_backend("reference"):
            expected = copy.deepcopy(model).double()(x.double())
        assert relative_error(fused(x), expected) < 1e-5
        assert len(called) == 6  # two of each branch, and both shortcuts
        called.clear()
        torch._dynamo.reset()
        assert relative_error(torch.compile(fused, fullgraph=True, backend="aot_eager")(x), expected) < 1e-5
        assert len(called) == 6
        exported = torch.export.export(fused, (x,)).module()
        assert not any("gsanet" in str(node.target) for node in exported.graph.nodes)
        assert relative_error(exported(x), expected) < 1e-5


def test_the_operator_is_one():
    x, weight, bias, residual = make((2, 40, 6, 5), 50, 2)
    for arguments in ((x, weight, bias, residual, True, [2, 2]), (x, weight, None, None, False, [1, 1])):
        torch.library.opcheck(pointwise.pointwise, arguments, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="native_pointwise has no gradient"):
        pointwise.pointwise(x.requires_grad_(), weight, bias, None, True, [1, 1]).sum().backward()
