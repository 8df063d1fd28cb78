"""The kernels for CPUs against the reference in float64: outputs, gradients, and what goes to the backend `torch`."""

import copy
import ctypes
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from helpers import gradients, maps, relative_error, table
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import gsanet
from gsanet import GlobalSelfAttention
from gsanet.functional import (
    content_attention,
    explain_backend,
    global_self_attention_map,
    native,
    positional_attention,
    use_backend,
)

pytestmark = pytest.mark.usefixtures("kernels")

ROUNDING = 2e-6
# Heads that fill vectors and heads that do not, lanes that stand in for missing ones, long, short and odd lines, keys
# and values of different widths.
SHAPES = [
    ((2, 14, 10, 8), 8, 8),
    ((1, 9, 13, 4), 9, 9),
    ((3, 7, 5, 3), 16, 12),
    ((1, 11, 17, 5), 4, 32),
    ((2, 1, 67, 2), 32, 4),
    ((1, 90, 3, 1), 17, 33),
    ((1, 5, 4, 8), 64, 64),
    ((2, 6, 6, 16), 12, 1),
]


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_double(function, *inputs):
    with use_backend("reference"):
        return function(*(one.detach().double().requires_grad_(one.requires_grad) for one in inputs))


def assert_close_to_reference(function, *inputs):
    value = function(*inputs)
    assert relative_error(value, in_double(function, *inputs)) < ROUNDING
    return value


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_content_and_its_gradients(shape, k, v, scale):
    q, keys, values = maps(shape, k, v, torch.float32)
    inputs = [one.requires_grad_() for one in (q, scale * keys, values)]
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    assert explain_backend("content_attention", *inputs).startswith("native")
    out = content_attention(*inputs)
    with use_backend("reference"):
        expected = content_attention(*doubles)
    assert relative_error(out, expected) < ROUNDING
    for found, wanted in zip(gradients(out, inputs), gradients(expected, doubles), strict=True):
        assert relative_error(found, wanted) < ROUNDING


@pytest.mark.parametrize("axis", ["column", "row"])
@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_positional_and_its_gradients(shape, k, v, axis):
    q, _, values = maps(shape, k, v, torch.float32, grad=True)
    for length, reach in ((max(shape[1:3]), None), (4, None), (100, 3)):
        rel = table(length, k, torch.float32, grad=True)
        assert explain_backend("positional_attention", q, values, rel).startswith("native")
        inputs = (q, values, rel)
        doubles = tuple(one.detach().double().requires_grad_() for one in inputs)
        out = positional_attention(*inputs, axis, reach)
        with use_backend("reference"):
            expected = positional_attention(*doubles, axis, reach)
        assert relative_error(out, expected) < ROUNDING
        for found, wanted in zip(gradients(out, inputs), gradients(expected, doubles), strict=True):
            assert relative_error(found, wanted) < ROUNDING


# Ways to lie in memory, of maps.
STRIDES = [
    lambda one: one.transpose(3, 4).contiguous().transpose(3, 4),  # channels that do not lie side by side
    lambda one: one.transpose(1, 2).contiguous().transpose(1, 2),
    lambda one: one.repeat_interleave(2, dim=3)[:, :, :, ::2],
    lambda one: one[:1].expand(3, -1, -1, -1, -1),
    lambda one: torch.cat((one, one), dim=2)[:, :, 1:-1],
]


@pytest.mark.parametrize("change", STRIDES)
def test_any_strides(change):
    q, keys, values = (change(one) for one in maps((2, 9, 6, 4), 8, 12, torch.float32))
    rel = table(9, 16, torch.float32)[:, ::2]
    assert_close_to_reference(content_attention, q, keys, values)
    leaves = [one.requires_grad_() for one in (q, keys, values)]
    found = gradients(content_attention(*leaves), leaves)
    with use_backend("torch"):
        expected = gradients(content_attention(*leaves), leaves)
    assert all(relative_error(*both) < ROUNDING for both in zip(found, expected, strict=True))
    q, keys, values = (one.detach() for one in leaves)
    assert_close_to_reference(lambda *x: positional_attention(*x, "column"), q, values, rel)
    assert_close_to_reference(lambda *x: positional_attention(*x, "row"), q, values, rel)


def test_two_runs_and_any_number_of_threads_give_the_same_bits():
    q, keys, values = maps((3, 19, 11, 8), 8, 8, torch.float32, grad=True)
    rel = table(19, 8, torch.float32, grad=True)

    def run(count):
        with threads(count):
            content = content_attention(q, keys, values)
            out = positional_attention(q, values, rel, "column")
            of_content = gradients(content, (q, keys, values))
            return content, out, *of_content, *gradients(out, (q, values, rel))

    first = run(1)
    for count in (1, 2, 5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(count), strict=True))


def test_what_is_not_finite_stays_in_its_image_and_line():
    q, keys, values = maps((2, 6, 7, 3), 5, 4, torch.float32)
    rel = table(7, 5, torch.float32)
    keys[1, 2, 3, 0, 4] = torch.inf
    values[0, 3, 1, 2, 0] = torch.nan
    for call in (
        lambda: content_attention(q, keys, values),
        lambda: positional_attention(q, values, rel, "column"),
        lambda: positional_attention(q, values, rel, "row"),
    ):
        found = call().isfinite()
        with use_backend("torch"):
            assert torch.equal(found, call().isfinite())


def test_keys_far_apart():
    q, keys, values = maps((1, 8, 8, 2), 8, 8, torch.float32)
    assert_close_to_reference(content_attention, q, 200 * keys, values)
    assert_close_to_reference(content_attention, q, 1e4 + keys, values)


def make_module(height, width, *, heads=8, dim=64, **settings):
    module = GlobalSelfAttention(dim, feat_size=(height, width), num_heads=heads, **settings)
    if module.norm is not None:
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(module.norm.weight)
        nn.init.normal_(module.norm.bias)
    return module.eval().requires_grad_(False)


MODULES = [
    {"height": 9, "width": 12},
    {"height": 8, "width": 6, "dim": 36, "heads": 4},
    {"height": 9, "width": 7, "stride": 2},
    {"height": 9, "width": 7, "stride": 3, "dim_out": 96, "dim_key": 32},
    {"height": 9, "width": 7, "content": False},
    {"height": 9, "width": 7, "row": False, "stride": 2},
    {"height": 9, "width": 7, "column": False},
    {"height": 9, "width": 7, "column": False, "row": False},
    {"height": 9, "width": 7, "reach": 2},
]


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("settings", MODULES, ids=str)
def test_whole_module(settings, at_once, monkeypatch):
    module = make_module(**settings)
    pixels = settings["height"] * settings["width"]
    monkeypatch.setattr(native.module, "PIECE", at_once * pixels * module.dim_out)
    x = torch.randn(5, module.dim, settings["height"], settings["width"])
    for given in (x, x.to(memory_format=torch.channels_last)):
        assert module(given).is_contiguous(memory_format=torch.channels_last)
        assert_close_to_double(module, given)


# Slots of one lane and of all, lanes to spare, several sets of heads; heads and inputs that fill no block.
@pytest.mark.parametrize(("heads", "dim", "dim_key", "dim_out"), [
    (1, 5, 3, 6), (2, 8, 32, 10), (3, 19, 9, 6), (6, 24, 24, 48), (12, 16, 24, 36), (16, 8, 32, 16), (20, 7, 40, 180),
])  # fmt: skip
@pytest.mark.parametrize("size", [(5, 6), (1, 9), (17, 2)])
def test_any_number_of_heads(heads, dim, dim_key, dim_out, size):
    module = make_module(*size, heads=heads, dim=dim, dim_key=dim_key, dim_out=dim_out)
    assert_close_to_double(module, torch.randn(2, dim, *size).to(memory_format=torch.channels_last))


def assert_close_to_double(module, x):
    with use_backend("reference"):
        expected = copy.deepcopy(module).double()(x.double())
    with poisoned_memory():
        assert relative_error(module(x), expected) < ROUNDING


@contextmanager
def poisoned_memory():
    """Memory that the kernels ask for is full of large numbers, where the C library knows how."""
    perturb = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    perturb(-6, 0x80)  # M_PERTURB: bytes of 0x7f, or 3.4e38
    try:
        yield
    finally:
        perturb(-6, 0)


@pytest.mark.parametrize("change", [
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    lambda x: x[:1].expand(3, -1, -1, -1),
    lambda x: torch.cat((x, x), dim=3)[..., 3:-3],
    lambda x: x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
])  # fmt: skip
def test_modules_take_maps_of_any_strides(change):
    assert_close_to_double(make_module(6, 6), change(torch.randn(2, 64, 6, 6)))


def without_affine(norm):
    return nn.BatchNorm2d(norm.num_features, affine=False).eval()


def with_strides(norm):
    for one in (*norm.parameters(), *norm.buffers()):
        if one.dim():
            one.data = one.data.repeat_interleave(2)[::2]
    return norm


@pytest.mark.parametrize("change", [without_affine, with_strides, lambda norm: None])
def test_norms_between_the_axes(change):
    module = make_module(5, 7)
    module.norm = change(module.norm)
    assert_close_to_double(module, torch.randn(2, 64, 5, 7))


def with_longer_tables(module):
    for name in ("rel_column", "rel_row"):
        setattr(module, name, nn.Parameter(torch.randn(25, 8), requires_grad=False))


def with_strided_tables(module):
    for name in ("rel_column", "rel_row"):
        table = getattr(module, name)
        table.data = table.data.T.contiguous().T


def with_reach(reach):
    return lambda module: setattr(module, "reach", reach)


@pytest.mark.parametrize("change", [
    with_longer_tables, with_strided_tables, with_reach(2), with_reach(7), with_reach(99),
])  # fmt: skip
def test_tables_that_are_not_what_a_line_needs(change):
    module = make_module(8, 6)
    change(module)
    assert_close_to_double(module, torch.randn(2, 64, 8, 6))
    assert_close_to_double(module, torch.randn(2, 64, 5, 6))


def test_tables_shorter_than_a_line():
    module = make_module(4, 6, keep_reach=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # said once
        assert_close_to_double(module, torch.randn(2, 64, 9, 6))


def test_nothing_is_kept_from_one_call_to_the_next():
    """Whatever way weights, norm or tables are changed."""
    module, x = make_module(9, 7), torch.randn(2, 64, 9, 7)

    def change(one):
        one.data = torch.randn_like(one)

    changes = [
        lambda: module.qkv.weight.mul_(1.5),
        lambda: module.rel_row.data.neg_(),
        lambda: module.norm.running_mean.add_(1),
        lambda: change(module.rel_column),
        lambda: change(module.norm.weight),
        lambda: setattr(module.norm, "eps", 1.0),
        lambda: module.load_state_dict(make_module(9, 7).state_dict()),
        lambda: setattr(module, "reach", 1),
    ]
    for number, step in enumerate(changes):
        before = module(x)
        step()
        assert relative_error(module(x), before) > 1e-3, number
        assert_close_to_double(module, x)


def test_the_output_is_where_the_input_is():
    """Whatever device and dtype are the default where nobody asks for one."""
    module, x = make_module(9, 7), torch.randn(2, 64, 9, 7)
    expected = module(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = module(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_few_calls_around_the_kernel():
    """Right after other work they are not in the cache, and each costs about two microseconds."""
    module, x = make_module(9, 7), torch.randn(2, 64, 9, 7)
    module(x)
    events = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        module(x)
    finally:
        sys.setprofile(before)
    assert sum(event in ("call", "c_call") for event in events) < 200


def test_an_image_does_not_depend_on_others_nor_on_threads():
    """Not in a bit."""
    module, x = make_module(9, 7), torch.randn(17, 64, 9, 7)
    expected = module(x)
    for count in (1, 2, 5, 40):
        with threads(count):
            for _ in range(5):
                assert torch.equal(module(x), expected)
            assert torch.equal(module(x[1:2]), expected[1:2])
    x[0, 0, 0, 0] = torch.inf
    assert module(x)[0].isnan().all()
    assert torch.equal(module(x)[1:], expected[1:])


@pytest.mark.parametrize("scale", [100, 1e4])
def test_modules_with_keys_far_apart(scale):
    module = make_module(6, 7)
    module.qkv.weight[64:128] *= scale
    assert_close_to_double(module, torch.randint(-3, 4, (2, 64, 6, 7)).float())


@pytest.mark.parametrize("stride", [1, 2])
def test_scale_shift_and_relu_behind_the_module(stride):
    x, weight = torch.randn(3, 16, 6, 8), torch.randn(48, 16)
    tables = table(6, 4, torch.float32), table(8, 4, torch.float32)
    norm, finish = torch.randn(2, 16), torch.randn(2, 16)
    settings = {"num_heads": 4, "dim_key": 16, "stride": stride}
    every = {**settings, "content": True, "reach": None, "finish": finish}
    said = explain_backend("global_self_attention_map", x, weight, *tables, norm, **every)
    assert said == "native: in one call; fused refuses: it runs on NVIDIA GPUs, not on cpu"
    out = global_self_attention_map(x, weight, *tables, norm, finish=finish, **settings)
    with use_backend("reference"):
        doubles = (one.double() for one in (x, weight, *tables, norm))
        expected = global_self_attention_map(*doubles, finish=finish.double(), **settings)
    assert relative_error(out, expected) < ROUNDING
    assert (out == 0).any()


def test_relu_keeps_nan():
    x, weight, tables = torch.randn(1, 16, 4, 4), torch.randn(48, 16), [table(4, 4, torch.float32)] * 2
    x[0, 0, 0, 0] = torch.nan
    finish = torch.ones(2, 16)
    out = global_self_attention_map(x, weight, *tables, finish, finish=finish, num_heads=4, dim_key=16)
    assert out.isnan().all()


def test_training_steps_follow_the_backend_torch():
    module = GlobalSelfAttention(32, feat_size=(10, 12), num_heads=4)
    twin = copy.deepcopy(module)
    x, target = torch.randn(4, 32, 10, 12), torch.randn(4, 32, 10, 12)
    for trained, name in ((module, "native"), (twin, "torch")):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(5):
            with use_backend(name):
                loss = (trained(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, one), other in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        assert relative_error(one, other) < 1e-4, name


def test_second_derivatives_are_those_of_the_backend_torch():
    inputs = (*maps((1, 6, 7, 2), 4, 4, torch.float32, grad=True)[::2], table(6, 4, torch.float32, grad=True))

    def second(name, wanted):
        with use_backend(name):
            out = positional_attention(*inputs, "column")
            first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
            return torch.autograd.grad(sum(one.square().sum() for one in first), wanted)

    for wanted in (inputs, inputs[1:2], inputs[::2]):
        for found, expected in zip(second("native", wanted), second("torch", wanted), strict=True):
            assert relative_error(found, expected) < ROUNDING


def test_a_network():
    model = gsanet.create_model("gsa_resnet26_tiny", num_classes=5, img_size=32).eval()
    for layer in model.modules():  # a new network's blocks end in norms of weight zero, and would hide all of it
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        found, fused = model(images), gsanet.fuse_for_inference(model)(images)
        with use_backend("torch"):
            expected = model(images)
    assert 0 < relative_error(found, expected) < 1e-5
    assert relative_error(fused, expected) < 1e-5


def fake_call(q, k, v):
    with FlopCounterMode(display=False) as counter:
        content_attention(q, k, v)
    assert counter.get_total_flops() > 0


def dual_call(q, k, v):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert "plain" in explain_backend("content_attention", dual, k, v)
        assert forward_ad.unpack_dual(content_attention(dual, k, v)).tangent is not None


def compiled_call(q, k, v):
    compiled = torch.compile(content_attention, backend="eager", fullgraph=True)
    assert relative_error(compiled(q, k, v), content_attention(q, k, v)) < ROUNDING


def test_a_module_with_tangents_is_no_work_for_a_kernel():
    """Of the map, of weights and of the norm; where there may be some but are none, it is."""
    module = make_module(6, 5)
    x, weight = torch.randn(2, 64, 6, 5), module.qkv.weight.flatten(1)
    settings = {"num_heads": 8, "dim_key": 64, "content": True, "reach": None, "stride": 1}

    def explain(x=x, weight=weight, column=module.rel_column, row=module.rel_row, norm=module.norm):
        return explain_backend("global_self_attention_map", x, weight, column, row, norm, **settings)

    with forward_ad.dual_level():
        assert explain().startswith("native: in one call")
        given = {"x": x, "weight": weight, "column": module.rel_column, "row": module.rel_row}
        for name, one in given.items():
            assert "plain tensors" in explain(**{name: forward_ad.make_dual(one, torch.ones_like(one))}), name
        statistics = module.norm.running_var
        module.norm.running_var = forward_ad.make_dual(statistics, torch.ones_like(statistics))
        assert "norms of plain tensors" in explain()


@pytest.mark.parametrize("call", [fake_call, dual_call, compiled_call])
def test_what_watches_tensors_sees_operators(call):
    call(*maps((1, 4, 5, 2), 8, 8, torch.float32))


def test_refusals():
    q, k, v = maps((1, 4, 5, 2), 8, 8, torch.float32)
    rel = table(4, 8, torch.float32)

    def reason(operation, *tensors, **settings):
        said = explain_backend(operation, *tensors, **settings)
        assert not said.startswith("native")
        return said

    assert "float32 and bfloat16, not torch.float64" in reason("content_attention", q.double(), k.double(), v.double())
    assert "not on meta" in reason("positional_attention", q.to("meta"), v.to("meta"), rel.to("meta"))
    assert "too small" in reason("content_attention", *(one[:0] for one in (q.detach(), k, v)))
    wide, long = maps((1, 4, 5, 2), 129, 4, torch.float32), maps((1, 1, 2049, 1), 4, 4, torch.float32)
    assert "heads of up to 128 channels, not 129" in reason("content_attention", *wide)
    assert "up to 2048 x 2048 pixels, not 1 x 2049" in reason("content_attention", *long)
    module = make_module(4, 5)
    whole = (torch.randn(2, 64, 4, 5), module.qkv.weight.flatten(1), module.rel_column, module.rel_row)
    settings = {"num_heads": 8, "dim_key": 64, "content": True, "reach": None, "stride": 1}

    def module_reason(norm, *tensors):
        return reason("global_self_attention_map", *(tensors or whole), norm, **settings)

    assert "inside, not GroupNorm" in module_reason(nn.GroupNorm(2, 64))
    assert "only with both axes" in module_reason(torch.randn(2, 64).requires_grad_())
    settings["finish"] = torch.randn(2, 64)
    assert "and nothing behind" in module_reason(nn.BatchNorm2d(64).eval())
    with torch.no_grad():
        assert "behind a module are for evaluation" in module_reason(nn.BatchNorm2d(64))
    settings["finish"].requires_grad_()
    assert "behind a module are for evaluation" in module_reason(nn.BatchNorm2d(64).eval())
    settings["finish"] = None
    one = torch.randn(1, 64, 1, 1)
    assert "nothing to normalise" in module_reason(nn.BatchNorm2d(64), one, *whole[1:])
    assert "for 32 channels" in module_reason(nn.BatchNorm2d(32).eval())
    for change in (torch.float64, "meta"):
        norm = nn.BatchNorm2d(64).eval().to(change)
        assert "norms of plain tensors in float32 or bfloat16 on the CPU" in module_reason(norm)
    module.norm.register_forward_hook(lambda *_: None)
    assert "hooks" in module_reason(module.norm)


@pytest.mark.parametrize("name", ["rel_column", "rel_row"])
def test_tables_of_another_kind(name):
    module, x = make_module(6, 5), torch.randn(2, 64, 6, 5)
    table = getattr(module, name)
    table.data = table.data.double()
    with pytest.raises(TypeError, match=rf"same dtype, got x torch.float32, .*{name} torch.float64"):
        module(x)
    table.data = table.data.float()[1:]
    with pytest.raises(ValueError, match=rf"{name} must have shape \(2 \* length - 1, 8\)"):
        module(x[:, :, :5, :4])


def test_empty_batches():
    with torch.no_grad():
        assert make_module(6, 7, stride=2)(torch.randn(0, 64, 6, 7)).shape == (0, 64, 3, 4)
        empty = maps((0, 4, 5, 2), 8, 8, torch.float32)
        assert content_attention(*empty).shape == (0, 4, 5, 2, 8)
