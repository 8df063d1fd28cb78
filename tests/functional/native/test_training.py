"""Whole modules in training on a CPU: outputs, gradients and statistics against the reference in float64."""

import copy

import pytest
import torch
from functional.native.test_native import ROUNDING, threads
from helpers import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import gsanet
from gsanet import GlobalSelfAttention
from gsanet.functional import projection, use_backend
from gsanet.functional.native import layer_ops, module_ops

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def calls(monkeypatch):
    """How often the operator of whole modules is called."""
    seen = []
    really = module_ops.attention_map

    def note(*arguments):
        seen.append(arguments)
        return really(*arguments)

    monkeypatch.setattr(module_ops, "attention_map", note)
    return seen


def make_module(height, width, *, heads=8, dim=64, **settings):
    """A module whose norm is no identity, and whose column layer has a mean that is not zero."""
    module = GlobalSelfAttention(dim, feat_size=(height, width), num_heads=heads, **settings)
    if module.norm is not None and module.norm.affine:
        nn.init.normal_(module.norm.weight)
        nn.init.normal_(module.norm.bias)
    if module.norm is not None:
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 2)
    return module


def trained(module, x, backend=None):
    """Output, gradients of the map and of all parameters, and what the norm keeps, of a copy."""
    module, x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with use_backend(backend or "native"):
        out = module(x)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
        found = torch.autograd.grad((out * weight).sum(), [x, *module.parameters()])
    names = ["output", "map", *(name for name, _ in module.named_parameters())]
    return dict(zip(names, [out, *found], strict=True)) | dict(module.named_buffers())


def assert_close_to_double(module, x, bound=ROUNDING):
    expected = trained(copy.deepcopy(module).double(), x.double(), "reference")
    found = trained(module, x)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert relative_error(value, expected[name]) < bound, name
    return found


MODULES = [
    {"height": 9, "width": 12},
    {"height": 8, "width": 6, "dim": 36, "heads": 4},
    {"height": 9, "width": 7, "stride": 2},
    {"height": 9, "width": 7, "stride": 3, "dim_out": 96, "dim_key": 32},
    {"height": 9, "width": 7, "content": False},
    {"height": 9, "width": 7, "reach": 2},
    {"height": 5, "width": 6, "heads": 1, "dim": 5, "dim_key": 3, "dim_out": 6},
    {"height": 1, "width": 9, "heads": 3, "dim": 19, "dim_key": 9, "dim_out": 6},
    {"height": 17, "width": 2, "heads": 20, "dim": 7, "dim_key": 40, "dim_out": 180},
    {"height": 4, "width": 4, "heads": 2, "dim": 64, "dim_out": 128},
]
ONE_AXIS = [
    {"height": 9, "width": 7, "row": False, "stride": 2},
    {"height": 9, "width": 7, "column": False},
    {"height": 9, "width": 7, "column": False, "row": False},
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", MODULES, ids=str)
def test_whole_modules(settings, training, calls):
    module = make_module(**settings).train(training)
    x = torch.randn(3, module.dim, settings["height"], settings["width"])
    assert_close_to_double(module, x.to(memory_format=torch.channels_last))
    assert len(calls) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", ONE_AXIS, ids=str)
def test_one_axis_goes_layer_by_layer(settings, training, calls):
    module = make_module(**settings).train(training)
    assert_close_to_double(module, torch.randn(3, 64, 9, 7))
    assert not calls


@pytest.mark.parametrize("change", [
    lambda x: x,
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    lambda x: torch.cat((x, x), dim=3)[..., 3:-3],
])  # fmt: skip
def test_maps_of_any_strides(change):
    module, x = make_module(6, 6), change(torch.randn(2, 64, 6, 6)).requires_grad_()

    def differentiate(name):
        twin = copy.deepcopy(module)
        with use_backend(name):
            out = twin(x)
        assert out.is_contiguous(memory_format=torch.channels_last)
        return torch.autograd.grad(out.square().sum(), [x, *twin.parameters()])

    for found, expected in zip(differentiate("native"), differentiate("torch"), strict=True):
        assert relative_error(found, expected) < 1e-5


def test_gradients_of_any_strides():
    """What is behind a module may give its gradient in any order of memory."""
    module, x = make_module(6, 6), torch.randn(2, 64, 6, 6)
    gradient = torch.randn(2, 64, 6, 6)
    turned = gradient.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)

    def differentiate(d_out):
        twin = copy.deepcopy(module)
        return torch.autograd.grad(twin(x), list(twin.parameters()), d_out)

    expected = differentiate(gradient)
    for one in (gradient.to(memory_format=torch.channels_last), turned):
        assert all(torch.equal(*both) for both in zip(differentiate(one), expected, strict=True))
    level = gradient[:, :1, :1, :1]
    found, expected = differentiate(level.expand(2, 64, 6, 6)), differentiate(level.repeat(1, 64, 6, 6))
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", [
    {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.5},
], ids=str)  # fmt: skip
def test_norms_between_the_axes(change, training, calls):
    module = make_module(9, 7)
    module.norm = nn.BatchNorm2d(64, **change)
    module.train(training)
    assert_close_to_double(module, torch.randn(3, 64, 9, 7))
    assert len(calls) == 1


def test_a_mean_far_from_zero():
    """Moments do not cancel: the variance is right where it is a millionth of the mean's square."""
    module, x = make_module(9, 7, heads=1, dim=8), torch.randn(4, 8, 9, 7)
    x[:, 0] = 1
    with torch.no_grad():
        module.qkv.weight[:8] = 0
        module.qkv.weight[:8, 0] = 1  # queries are 1,
        module.rel_column.zero_()[8] = 1  # each pixel attends to itself,
        module.qkv.weight[16:, 0] = 1000  # and values are 1,000 and a bit
    expected = trained(copy.deepcopy(module).double(), x.double(), "reference")
    found = trained(module, x)
    assert relative_error(found["norm.running_var"], expected["norm.running_var"]) < 1e-5


def test_projections_without_onednn(monkeypatch):
    monkeypatch.setattr(projection, "has_onednn", lambda dtype: False)
    for change in (lambda x: x, lambda x: x.to(memory_format=torch.channels_last)):
        assert_close_to_double(make_module(9, 7), change(torch.randn(3, 64, 9, 7)))


def test_two_runs_and_any_number_of_threads_give_the_same_bits():
    module, x = make_module(9, 7), torch.randn(5, 64, 9, 7)
    first = trained(module, x)
    for count in (1, 2, 5):
        with threads(count):
            for name, value in trained(module, x).items():
                assert torch.equal(value, first[name]), name


def test_training_statistics_without_gradients(calls):
    """As when a norm's statistics are taken anew."""
    module = make_module(9, 7)
    twin, x = copy.deepcopy(module), torch.randn(5, 64, 9, 7)
    with torch.no_grad():
        found = module(x)
        with use_backend("torch"):
            expected = twin(x)
    assert len(calls) == 1
    assert relative_error(found, expected) < ROUNDING
    for one, other in zip(module.buffers(), twin.buffers(), strict=True):
        assert relative_error(one, other) < ROUNDING


def test_parts_that_are_frozen():
    """Only what asks for a gradient gets one."""
    module, x = make_module(9, 7), torch.randn(2, 64, 9, 7)
    everything = trained(module, x)
    for name, parameter in module.named_parameters():
        twin = copy.deepcopy(module).requires_grad_(False)
        twin.get_parameter(name).requires_grad_()
        weight = torch.randn(2, 64, 9, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
        (twin(x) * weight).sum().backward()
        assert torch.equal(twin.get_parameter(name).grad, everything[name])
        assert all(one.grad is None for other, one in twin.named_parameters() if other != name), parameter.shape


def test_checkpointing_gives_the_same_gradients():
    module, x = make_module(9, 7), torch.randn(2, 64, 9, 7, requires_grad=True)
    kept = copy.deepcopy(module)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    (found,) = torch.autograd.grad(checkpoint(kept, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives_are_those_of_the_backend_torch(training):
    module = make_module(5, 6, heads=2, dim=8).train(training)
    x = torch.randn(2, 8, 5, 6, requires_grad=True)

    def second(name):
        twin = copy.deepcopy(module)
        with use_backend(name):
            out = twin(x)
            first = torch.autograd.grad(out.square().sum(), [x, *twin.parameters()], create_graph=True)
            return torch.autograd.grad(sum(one.square().sum() for one in first), [x, twin.rel_row, twin.qkv.weight])

    for found, expected in zip(second("native"), second("torch"), strict=True):
        assert relative_error(found, expected) < 1e-4


def test_50_steps_follow_the_reference():
    """With momentum, as networks are trained; the norm's statistics as well."""
    module = make_module(8, 8, heads=4, dim=32)
    twin = copy.deepcopy(module).double()
    x, target = torch.randn(4, 32, 8, 8), torch.randn(4, 32, 8, 8)
    for trained_one, name in ((module, "native"), (twin, "reference")):
        dtype = next(trained_one.parameters()).dtype
        optimizer = torch.optim.SGD(trained_one.parameters(), lr=0.05, momentum=0.9)
        for _ in range(50):
            with use_backend(name):
                loss = (trained_one(x.to(dtype)) - target.to(dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, one), other in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        assert relative_error(one, other) < 1e-4, name


# --- Compiled.


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("settings", [MODULES[0], MODULES[2], MODULES[4], *ONE_AXIS], ids=str)
def test_compiled(settings):
    """In one graph, in training, in evaluation with gradients and without; and once for all sizes of a batch."""
    module = make_module(**settings)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 64, settings["height"], settings["width"]).to(memory_format=torch.channels_last)
    for training in (True, False):
        module.train(training)
        compiled.train(training)
        leaf = x.clone().requires_grad_()
        both = []
        for one in (module, compiled):
            out = one(leaf)
            both.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *one.parameters()])])
        for one, other in zip(*both, strict=True):
            assert relative_error(other, one) < 1e-6
    with torch.no_grad():
        assert relative_error(compiled(x), module(x)) < 1e-6
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in (3, 5, 7):
                some = torch.randn(batch, *x.shape[1:]).to(memory_format=torch.channels_last)
                assert relative_error(compiled(some), module(some)) < 1e-6
    for one, other in zip(module.buffers(), compiled.buffers(), strict=True):
        assert relative_error(other, one) < 1e-6


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_step_of_a_compiled_network():
    """By torch.compile's own compiler, which has a mind of its own about what lies where in memory."""
    model = gsanet.create_model("gsa_resnet26_tiny", num_classes=5, img_size=32, depths=(1, 1), widths=(64, 128))
    compiled, images = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
    found, expected = (
        torch.autograd.grad(run(images).square().sum(), list(one.parameters()))
        for one, run in ((compiled, torch.compile(compiled, fullgraph=True)), (model, model))
    )
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-3 or other.norm() < 1e-4
    for one, other in zip(compiled.buffers(), model.buffers(), strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_network_has_the_kernels(calls):
    """A network's graph has one operator for each of its modules, and the outputs of the network as it is."""
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if "gsanet" in str(node.target))
        return graph.forward

    model = gsanet.create_model("gsa_resnet26_tiny", num_classes=5, img_size=32)
    modules = sum(isinstance(one, GlobalSelfAttention) for one in model.modules())
    images = torch.randn(2, 3, 32, 32)
    torch.compile(copy.deepcopy(model), backend=look, fullgraph=True)(images)
    assert len(seen) == modules
    assert all("native_attention_map" in one for one in seen)
    seen.clear()
    torch._dynamo.reset()
    model.eval()
    with torch.no_grad():
        found = torch.compile(model, backend=look, fullgraph=True)(images)
        assert relative_error(found, model(images)) < 1e-6
    assert len(seen) == modules
    assert all("native_attention_map_inference" in one for one in seen)


def test_exports_have_operators_of_pytorch():
    module = make_module(6, 6).eval()
    program = torch.export.export(module, (torch.randn(2, 64, 6, 6),))
    assert not any("gsanet" in str(node.target) for node in program.graph.nodes)


def test_operators_are_what_their_fake_implementations_say():
    q, k, v = (torch.randn(2, 5, 4, 3, width, requires_grad=True) for width in (4, 4, 6))
    rel = torch.randn(9, 4, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(layer_ops.content_attention, (q, k, v), test_utils=tests)
    torch.library.opcheck(layer_ops.positional_attention, (q, v, rel, "column"), test_utils=tests)
    x, weight = torch.randn(2, 8, 5, 6, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    tables = [torch.randn(2 * n - 1, 4, requires_grad=True) for n in (5, 6)]
    for content in (True, False):
        stacked = weight if content else weight[8:].detach().requires_grad_()
        for applied in (None, torch.rand(5, 8)):
            arguments = (x, stacked, *tables, torch.ones(8, requires_grad=True), None, applied, 2, 8, content, 1e-5)
            torch.library.opcheck(module_ops.attention_map, arguments, test_utils=tests)
        fixed = [one.detach() for one in (x, stacked, *tables)]
        for stride in (1, 2):
            arguments = (*fixed, torch.rand(2, 8), None, 2, 8, content, stride)
            torch.library.opcheck(module_ops.attention_map_inference, arguments, test_utils=tests[:3])
