"""The kernels for CPUs with maps in bfloat16: against the reference in float64, and in networks under autocast."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functional.native.test_native import MODULES, SHAPES, STRIDES, make_module, poisoned_memory, threads
from functional.native.test_pointwise import SHAPES as POINTWISE
from functional.native.test_pointwise import called, in_double, make  # noqa: F401 (a fixture)
from functional.native.test_training import MODULES as TRAINED
from functional.native.test_training import assert_close_to_double, calls, trained  # noqa: F401 (a fixture)
from functional.native.test_training import make_module as make_trained
from helpers import gradients, maps, relative_error, table
from torch import nn

import gsanet
from gsanet.functional import content_attention, explain_backend, positional_attention, use_backend
from gsanet.functional.convolution import convolution_relu, pointwise_convolution
from gsanet.functional.native import layer_ops, module_ops, pointwise

pytestmark = pytest.mark.usefixtures("kernels")

ROUNDING = 1e-2


def rounded(*tensors):
    return [one.bfloat16().requires_grad_(one.requires_grad) for one in (tensor.detach() for tensor in tensors)]


def assert_layer_close(function, *inputs):
    """Output and gradients, of leaves in bfloat16."""
    inputs = [one.detach().bfloat16().requires_grad_() for one in inputs]
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    out = function(*inputs)
    assert out.dtype == torch.bfloat16
    with use_backend("reference"):
        expected = function(*doubles)
    assert relative_error(out, expected) < ROUNDING
    for found, wanted in zip(gradients(out, inputs), gradients(expected, doubles), strict=True):
        assert found.dtype == torch.bfloat16
        assert relative_error(found, wanted) < ROUNDING


@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_content_and_its_gradients(shape, k, v):
    q, keys, values = maps(shape, k, v, torch.float32)
    assert explain_backend("content_attention", *rounded(q, keys, values)).startswith("native")
    assert_layer_close(content_attention, q, keys, values)


@pytest.mark.parametrize("axis", ["column", "row"])
@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_positional_and_its_gradients(shape, k, v, axis):
    q, _, values = maps(shape, k, v, torch.float32)
    for length, reach in ((max(shape[1:3]), None), (4, None), (100, 3)):
        rel = table(length, k, torch.float32)
        assert explain_backend("positional_attention", *rounded(q, values, rel)).startswith("native")
        assert_layer_close(partial(positional_attention, axis=axis, reach=reach), q, values, rel)


@pytest.mark.parametrize("change", STRIDES)
def test_any_strides(change):
    q, keys, values = (change(one.bfloat16()) for one in maps((2, 9, 6, 4), 8, 12))
    rel = table(9, 8, torch.bfloat16)
    for function, inputs in (
        (content_attention, (q, keys, values)),
        (lambda *x: positional_attention(*x, "column"), (q, values, rel)),
        (lambda *x: positional_attention(*x, "row"), (q, values, rel)),
    ):
        with use_backend("reference"):
            expected = function(*(one.double() for one in inputs))
        assert relative_error(function(*inputs), expected) < ROUNDING


@pytest.mark.parametrize("width", [1, 16])
def test_outputs_are_rounded_to_the_nearest(width):
    """Of two numbers as near to the even one; and what is not finite, or hardly above zero, stays so."""
    ends = torch.tensor([0.0, 1.0, 1.0078125, 3.3895e38, 1e-38, 1e-40, torch.inf, torch.nan, -1.5, -torch.inf])
    q = torch.cat((torch.randn(1000), ends, -(2.0 ** torch.arange(-8, 8)))).bfloat16().view(1, 1, -1, 1, 1)
    v = torch.cat((torch.randn(1000), ends.flip(0), 1 + 2.0 ** -torch.arange(1, 17))).bfloat16().view(1, 1, -1, 1, 1)
    v = v.expand(-1, -1, -1, -1, width)
    found = positional_attention(q, v, torch.ones(1, 1).bfloat16(), "column")  # of one pixel: a product
    torch.testing.assert_close(found, (q.float() * v.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("settings", MODULES, ids=str)
def test_whole_modules_in_evaluation(settings):
    module = make_module(**settings)
    x = torch.randn(5, module.dim, settings["height"], settings["width"]).bfloat16()
    for given in (x, x.to(memory_format=torch.channels_last)):
        assert_module_close(module, given)


@pytest.mark.parametrize(("heads", "dim", "dim_key", "dim_out"), [
    (1, 5, 3, 6), (2, 8, 32, 10), (3, 19, 9, 6), (6, 24, 24, 48), (12, 16, 24, 36), (16, 8, 32, 16), (20, 7, 40, 180),
])  # fmt: skip
def test_any_number_of_heads(heads, dim, dim_key, dim_out):
    module = make_module(5, 6, heads=heads, dim=dim, dim_key=dim_key, dim_out=dim_out)
    x = torch.randn(2, dim, 5, 6).bfloat16()
    for given in (x, x.to(memory_format=torch.channels_last), x.repeat_interleave(2, dim=1)[:, ::2]):
        assert_module_close(module, given)


def assert_module_close(module, x):
    """Of a module all in bfloat16, and of one whose parameters autocast rounds."""
    whole = copy.deepcopy(module).bfloat16()
    for parameter in (module.qkv.weight, module.rel_column, module.rel_row):
        if parameter is not None:
            parameter.data = parameter.data.bfloat16().float()
    with use_backend("reference"):
        of_whole = copy.deepcopy(whole).double()(x.double())
        expected = copy.deepcopy(module).double()(x.double())
    with poisoned_memory():
        assert relative_error(whole(x), of_whole) < ROUNDING
        with torch.autocast("cpu", torch.bfloat16):
            found = module(x)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(found, expected) < ROUNDING


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", TRAINED, ids=str)
def test_whole_modules_in_training(settings, training, calls):  # noqa: F811
    module = make_trained(**settings).train(training).bfloat16()
    x = torch.randn(3, module.dim, settings["height"], settings["width"])
    assert_close_to_double(module, x.to(memory_format=torch.channels_last).bfloat16(), bound=2 * ROUNDING)
    assert len(calls) == 1


def test_training_under_autocast():
    """Parameters, and what the norm keeps, stay in float32, as do their gradients."""
    module = make_trained(9, 7)
    x = torch.randn(3, 64, 9, 7).bfloat16()
    expected = trained(copy.deepcopy(module).double(), x.double(), "reference")
    with torch.autocast("cpu", torch.bfloat16):
        found = trained(module, x)
    for name, value in found.items():
        assert value.dtype in (torch.bfloat16 if name in ("output", "map") else torch.float32, torch.int64)
        assert relative_error(value, expected[name]) < ROUNDING, name


def test_projections_without_onednn(monkeypatch):
    monkeypatch.setattr("gsanet.functional.projection.has_onednn", lambda dtype: False)
    assert_close_to_double(make_trained(9, 7).bfloat16(), torch.randn(3, 64, 9, 7).bfloat16(), bound=ROUNDING)


def test_two_runs_and_any_number_of_threads_give_the_same_bits():
    module, x = make_trained(9, 7).bfloat16(), torch.randn(5, 64, 9, 7).bfloat16()
    first, fixed = trained(module, x), copy.deepcopy(module).eval()
    with torch.no_grad():
        expected = fixed(x)
        for count in (1, 2, 5):
            with threads(count), torch.enable_grad():
                for name, value in trained(module, x).items():
                    assert torch.equal(value, first[name]), name
            with threads(count):
                assert torch.equal(fixed(x), expected)


def test_what_is_not_finite_stays_in_its_image():
    module, x = make_module(9, 7).bfloat16(), torch.randn(3, 64, 9, 7).bfloat16()
    expected = module(x)
    for value in (torch.inf, torch.nan):
        x[0, 0, 0, 0] = value
        assert module(x)[0].isnan().all()
        assert torch.equal(module(x)[1:], expected[1:])


@pytest.mark.parametrize(("shape", "outputs", "stride"), POINTWISE)
def test_pointwise_convolutions(shape, outputs, stride, called):  # noqa: F811
    x, weight, bias, residual = (one.bfloat16() for one in make(shape, outputs, stride))
    for given in (x, x.contiguous()):
        out = convolution_relu(given, weight, bias, residual, (stride, stride))
        assert out.dtype == torch.bfloat16
        assert relative_error(out, in_double(x, weight, bias, residual, stride, True)) < ROUNDING
        out = pointwise_convolution(given, weight, None, (stride, stride))
        assert relative_error(out, in_double(x, weight, None, None, stride, False)) < ROUNDING
    assert len(called) == 4


def test_second_derivatives_are_those_of_the_backend_torch():
    module = make_trained(5, 6, heads=2, dim=8).bfloat16()
    x = torch.randn(2, 8, 5, 6).bfloat16().requires_grad_()

    def second(name):
        twin = copy.deepcopy(module)
        with use_backend(name):
            (first,) = torch.autograd.grad(twin(x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), twin.qkv.weight)

    for found, expected in zip(second("native"), second("torch"), strict=True):
        assert relative_error(found, expected) < 0.1


def test_fused_networks(called):  # noqa: F811
    """As `fuse_for_inference` makes them: by kernels from the first convolution of a block to its sum."""
    model = gsanet.create_model("gsa_resnet26", depths=(1, 1), widths=(32, 64), img_size=32, num_classes=7).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    with torch.no_grad():
        with use_backend("reference"):
            expected = copy.deepcopy(model).double()(x.double())
        fused = gsanet.fuse_for_inference(model).bfloat16()
        assert relative_error(fused(x.bfloat16()), expected) < 3 * ROUNDING
        assert len(called) == 6
        torch._dynamo.reset()
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(x.bfloat16()), expected) < 3 * ROUNDING
        assert len(called) == 12


@pytest.mark.parametrize("training", [True, False])
def test_compiled_under_autocast(training):
    torch._dynamo.reset()
    module = make_trained(9, 7, stride=2).train(training)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    both = []
    for one in (module, compiled):
        x = torch.randn(4, 64, 9, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        both.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *one.parameters()])])
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(other, one) < ROUNDING
    torch._dynamo.reset()


def test_operators_are_what_their_fake_implementations_say():
    q, k, v = (torch.randn(2, 5, 4, 3, width).bfloat16().requires_grad_() for width in (4, 4, 6))
    rel = torch.randn(9, 4).bfloat16().requires_grad_()
    without_gradient = ("test_schema", "test_faketensor")
    tests = (*without_gradient, "test_autograd_registration")
    torch.library.opcheck(layer_ops.content_attention, (q, k, v), test_utils=tests)
    torch.library.opcheck(layer_ops.positional_attention, (q, v, rel, "column"), test_utils=tests)
    x, weight = torch.randn(2, 8, 5, 6).bfloat16(), torch.randn(24, 8).bfloat16()
    tables = [torch.randn(2 * n - 1, 4).bfloat16() for n in (5, 6)]
    leaves = [one.requires_grad_() for one in (x, weight, *tables)]
    arguments = (*leaves, torch.ones(8, requires_grad=True), None, None, 2, 8, True, 1e-5)
    torch.library.opcheck(module_ops.attention_map, arguments, test_utils=tests)
    fixed = [one.detach() for one in leaves]
    for stride in (1, 2):
        arguments = (*fixed, torch.rand(2, 8), torch.rand(2, 8), 2, 8, True, stride)
        torch.library.opcheck(
            module_ops.attention_map_inference, arguments, test_utils=("test_schema", "test_faketensor")
        )
    convolved = torch.randn(2, 40, 6, 5).bfloat16(), torch.randn(50, 40, 1, 1).bfloat16()
    arguments = (*convolved, None, None, True, [1, 1])
    torch.library.opcheck(pointwise.pointwise, arguments, test_utils=without_gradient)


def test_a_network_trains():
    """A few steps, with autocast and without: losses stay together."""
    losses = {}
    for enabled in (False, True):
        torch.manual_seed(0)
        model = gsanet.create_model("gsa_resnet26_tiny", num_classes=5, img_size=32, depths=(1, 1), widths=(64, 128))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 5
        for _ in range(15):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[enabled] = loss.item()
    assert losses[True] == pytest.approx(losses[False], rel=0.1)
    assert losses[True] < math.log(5)
