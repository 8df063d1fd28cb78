"""The entry of a residual block, whose gradient takes in the shortcut's and the mask before it: against the layers."""

import copy
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from functional.fused.test_expansion import LAST, feature_map, network
from functional.fused.test_kernels import BF16, FLOAT, HALF, count_operator, normal
from helpers import relative_error
from timm.layers import DropPath
from timm.models.byobnet import BottleneckBlock
from torch import nn

import gsanet
from gsanet.functional import use_backend
from gsanet.functional.fused import entry, expansion, expansion_ops, pointwise
from gsanet.layers.residual_block import CompiledStage, convert_blocks

# --- Alone.


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=str)
def test_gradients(needed):
    """Of what entered the ReLU, by either of the two ways out of it."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(24, 8, 1, bias=False).double().requires_grad_(needed[1])
    x = normal(2, 24, 5, 4).to(memory_format=LAST)
    d_z, d_shortcut = normal(2, 8, 5, 4, seed=1), normal(2, 24, 5, 4, seed=2)

    def gradients(outputs, leaf):
        leaves = [one for one, need in zip((leaf, convolution.weight), needed, strict=True) if need]
        return torch.autograd.grad(outputs, leaves, (d_z, d_shortcut))

    before = x.clone().requires_grad_(needed[0])
    shortcut = before.relu() if needed[0] else before.relu().requires_grad_()
    expected = gradients((convolution(shortcut), shortcut), before)
    y = x.relu().requires_grad_(needed[0])
    out = entry.enter(y, convolution)
    assert torch.equal(out[0], convolution(y))
    assert torch.equal(out[1], y)
    for found, value in zip(gradients(out, y), expected, strict=True):
        assert relative_error(found, value) < 1e-12


def test_operator_is_registered_as_it_should_be():
    d_z, d_shortcut, y = (feature_map(FLOAT, 2, channels, 5, 4) for channels in (8, 24, 24))
    torch.library.opcheck(entry.entry_gradient, (d_z, normal(8, 24, 1, 1, dtype=FLOAT), d_shortcut, y))


def test_operator_by_kernel(kernels):
    maps = {channels: normal(2, channels, 5, 4, dtype=BF16, seed=channels) for channels in (64, 256)}
    d_z, d_shortcut = (one.to(kernels.device, memory_format=LAST) for one in maps.values())
    y = feature_map(BF16, 2, 256, 5, 4, device=kernels.device)
    weight = normal(64, 256, 1, 1, dtype=BF16).to(kernels.device)
    with kernels.running():
        found = entry.entry_gradient(d_z, weight, d_shortcut, y)
    assert kernels.entries == {"map_channels"}
    expected = torch.where(
        y > 0, nn.functional.conv_transpose2d(d_z.double(), weight.double()) + d_shortcut.double(), 0
    )
    assert found.is_contiguous(memory_format=LAST)
    assert relative_error(found, expected) < 3e-3


@pytest.mark.parametrize(("relu", "masked"), [(True, True), (True, False), (False, False)])
def test_who_masks(relu, masked):
    """The gradient of a shortcut: as it came, if it came with the mask."""
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24)
    residual = normal(2, 24, 5, 4, dtype=FLOAT).to(memory_format=LAST).requires_grad_()
    out = expansion.expand(feature_map(FLOAT, 2, 8, 5, 4), *layers, residual, relu=relu, masked=masked)
    d_out = normal(*out.shape, dtype=FLOAT, seed=1)
    (d_residual,) = torch.autograd.grad(out, residual, d_out)
    assert torch.equal(d_residual, torch.where(out > 0, d_out, 0) if relu and not masked else d_out)


# --- In stages.

SMALL = {"depths": (2, 2), "widths": (16, 32), "stem_width": 16, "zero_init_last": False}


@pytest.fixture
def wanted(monkeypatch):
    """Blocks of any size and dtype are computed so, if their channels are these: here by operators of PyTorch."""
    settings = {"wanted": True, "LEAST_NUMBERS": 1, "DTYPES": (BF16, HALF, FLOAT)}
    settings["takes_map"] = lambda x: x.is_contiguous(memory_format=LAST)
    for name, value in settings.items():
        monkeypatch.setattr(expansion, name, value)
    monkeypatch.setattr(entry, "fits_entry", lambda like, *channels: channels in {(16, 64), (32, 128)})


def make_stage(name="conv_resnet26", blocks=3, **options):
    """Of 16 channels, to 64."""
    return network(name, depths=(blocks, 1), **options).stages[0]


def results(run, model, x):
    """Of several outputs, all of which count: these, and all gradients and buffers."""
    model.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    outputs = run(x)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    sum(((i + 1) * one.square().sum() for i, one in enumerate(outputs)), start=0).backward()
    found = {str(i): one.detach() for i, one in enumerate(outputs)} | {"x": x.grad}
    found |= {name: one.grad for name, one in model.named_parameters()}
    return found | {name: one.clone() for name, one in model.named_buffers()}


def in_float64(run, model, x):
    """By the layers, which nobody compiles."""
    exact = copy.deepcopy(model).double()
    with use_backend("reference"):
        return results(lambda x: run(exact, x), exact, x.detach().double().requires_grad_(x.requires_grad))


def call(model, x):
    return model(x)


def check(model, x, entries, run=call):
    """Against the layers in float64, as if it were compiled: where blocks are joined is decided by the same code.

    Args:
        model: What is run.
        x: Its input.
        entries: How many of its blocks mask for the one before.
        run: A function of the model and x.
    """
    expected = in_float64(run, model, x)
    with (
        use_backend("torch"),
        mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        mock.patch.object(entry, "enter", wraps=entry.enter) as enter,
    ):
        found = results(lambda x: run(model, x), model, x)
    assert enter.call_count == entries
    check_close(found, expected, 1e-4)


def check_compiled(model, x, entries, backend, run=call, once=True):
    """The same, compiled, by one graph; `once`: the layers take their statistics once."""
    expected, graphs = in_float64(run, model, x), []

    def compiled(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    with use_backend("torch"):
        found = results(torch.compile(lambda x: run(model, x), fullgraph=True, backend=compiled), model, x)
    torch._dynamo.reset()
    (graph,) = graphs
    assert count_operator(graph, "entry_gradient") == entries  # those whose input needs a gradient
    check_close(found, expected, 1e-4, once)


def check_close(found, expected, tolerance, statistics=True):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] is None) == (value is None), key
        if value is not None and (statistics or not key.endswith(("running_mean", "running_var", "tracked"))):
            assert relative_error(found[key], value) < tolerance, key


def input_map(requires_grad=True):
    x = normal(2, 16, 5, 4, dtype=FLOAT).relu().to(memory_format=LAST)
    return x.requires_grad_(requires_grad)


def hooked(path):
    def change(stage):
        stage.get_submodule(path).register_forward_hook(lambda *arguments: None)

    return change


def frozen(*paths):
    def change(stage):
        for path in paths:
            stage.get_submodule(path).requires_grad_(False)

    return change


def dropping(stage):
    stage[1].drop_path = DropPath(0.0)


def norm_in_evaluation(stage):
    stage[1].conv3_1x1.bn.eval()


def something_between(stage):
    stage.insert(1, nn.Hardtanh(-0.5, 0.5))


def the_same_block_twice(stage):
    stage[2] = stage[1]


def another_kind(stage):
    stage[1].__class__ = BottleneckBlock


def another_forward(stage):
    stage[1].forward = partial(BottleneckBlock.forward, stage[1])


def other_channels(stage):
    """The last block has another plan, which is not in the table."""
    stage[2] = network("conv_resnet26", widths=(8, 32), depths=(2, 1), stem_width=64).stages[0][0]


# What is done to a stage of three blocks, and how many of its blocks then mask for the one before.
CASES = {
    "as it is": (lambda stage: None, 2),
    "a hook on the first block": (hooked("0"), 1),
    "a hook on the second block": (hooked("1"), 0),
    "a hook on the last block": (hooked("2"), 1),
    "a hook on a first convolution": (hooked("1.conv1_1x1.conv"), 1),
    "a hook on it with its norm": (hooked("2.conv1_1x1"), 1),
    "a hook on a shortcut": (hooked("1.shortcut"), 1),
    "a hook on a ReLU": (hooked("0.act"), 1),
    "frozen first convolutions": (frozen("1.conv1_1x1.conv", "2.conv1_1x1.conv"), 2),
    "a frozen block": (frozen("1"), 2),
    "frozen norms": (frozen("0.conv3_1x1.bn", "1.conv1_1x1.bn"), 2),
    "a dropped path": (dropping, 0),
    "an end by layers": (norm_in_evaluation, 1),
    "something between two blocks": (something_between, 1),
    "the same block twice": (the_same_block_twice, 2),
    "another kind of block": (another_kind, 0),
    "another forward": (another_forward, 0),
    "channels without a plan": (other_channels, 1),
}


@pytest.mark.parametrize(("change", "entries"), CASES.values(), ids=CASES)
def test_stage(wanted, change, entries):
    stage = make_stage()
    assert type(stage) is CompiledStage
    change(stage)
    check(stage, input_map(), entries)


def test_nothing_before_needs_a_gradient(wanted):
    stage = make_stage()
    frozen("0")(stage)
    check(stage, input_map(requires_grad=False), 2)


def test_attention(wanted):
    check(make_stage("gsa_resnet26"), input_map(), 2)


def test_off(wanted, monkeypatch):
    monkeypatch.setattr(entry, "wanted", False)
    check(make_stage(), input_map(), 0)


def test_in_evaluation(wanted):
    check(make_stage().eval(), input_map(), 0)


def test_outputs_between_blocks(wanted):
    """Blocks that are called one by one: what is between them may go elsewhere."""

    def run(stage, x):
        outputs = []
        for block in stage:
            x = block(x)
            outputs.append(x)
        return outputs

    check(make_stage(), input_map(), 0, run)


def test_part_of_a_stage(wanted):
    def run(stage, x):
        between = stage[:2](x)
        return stage[2:](between), between

    check(make_stage(), input_map(), 1, run)


def test_features(wanted):
    """Outputs of all stages, each with a gradient of its own."""
    model = network("conv_resnet26", depths=(2, 2))
    check(model, image(), 2, lambda model, x: model.forward_intermediates(x)[1])
    listed = gsanet.create_model("conv_resnet26", img_size=32, features_only=True, out_indices=(1, 2), **SMALL)
    check(listed, image(), 2)


def image():
    return normal(2, 3, 32, 32, dtype=FLOAT).to(memory_format=LAST).requires_grad_()


def test_compiled(wanted):
    check_compiled(make_stage(blocks=2), input_map(), 1, "inductor")


def test_compiled_with_checkpoints(wanted):
    """timm's, of whole stages: blocks inside of one still have each other's outputs alone."""
    model = network("conv_resnet26", depths=(2, 1))
    model.set_grad_checkpointing()
    check_compiled(model, image(), 1, "aot_eager", lambda model, x: model.forward_features(x), once=False)


def test_eager(wanted):
    """As plain blocks, with the same bits."""
    stage, x = make_stage(), input_map()
    plain = copy.deepcopy(nn.Sequential(*stage))
    found, expected = (results(one, one, x) for one in (stage, plain))
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_by_kernels(kernels, monkeypatch):
    """In 16 bits, all uses of the kernel: one entry, two ends, gradients of three expansions. As far from exact."""
    for name, value in {"wanted": True, "LEAST_NUMBERS": 1}.items():
        monkeypatch.setattr(expansion, name, value)
    monkeypatch.setattr(pointwise, "MANY", 1)
    monkeypatch.setattr(pointwise, "wanted", False)
    stage = make_stage(blocks=2, widths=(64, 64), stem_width=64).to(kernels.device)
    x = feature_map(BF16, 2, 64, 5, 4, device=kernels.device).requires_grad_()
    expected, errors = in_float64(call, stage, x), []
    for on in (True, False):
        monkeypatch.setattr(entry, "wanted", on)
        monkeypatch.setattr(expansion_ops, "sums_wanted", on)
        monkeypatch.setattr(pointwise, "many_wanted", on)
        own = copy.deepcopy(stage)
        with (
            kernels.running(),
            torch.autocast(kernels.device, BF16),
            mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        ):
            found = results(own, own, x)
        assert len(kernels.constants("map_channels")) == 6  # no more of them the second time
        errors.append({key: relative_error(found[key], value) for key, value in expected.items()})
    for key, usual in errors[1].items():
        assert errors[0][key] < 1.3 * usual + 5e-3, key


def test_backward_hooks_are_seen(wanted):
    stage, x = make_stage(), input_map()
    assert stage[1].takes_mask(x, 64)
    for path in ("1", "1.shortcut", "1.conv1_1x1.conv"):
        handle = stage.get_submodule(path).register_full_backward_hook(lambda *arguments: None)
        assert not stage[1].takes_mask(x, 64)
        handle.remove()
    stage[1].eval()
    assert not stage[1].takes_mask(x, 64)


def test_what_is_taken(planned, monkeypatch):
    convolution, x = nn.Conv2d(256, 64, 1, bias=False), torch.zeros(1, 8, 2, 2, dtype=BF16)
    with torch.autocast("cpu", BF16):
        assert entry.takes(x, 256, convolution)
        assert not entry.takes(x.float(), 256, convolution)
        assert not entry.takes(x.half(), 256, convolution)  # autocast says otherwise
        assert not entry.takes(x.to("meta"), 256, convolution)
        assert not entry.takes(x, 256, nn.Conv2d(256, 72, 1, bias=False))
    assert not entry.takes(x, 256, convolution)  # a convolution of two dtypes
    convolution.to(BF16)
    assert entry.takes(x, 256, convolution)
    planned.machine = replace(planned.machine, shared_memory=32 * 1024)
    assert not entry.takes(x, 256, convolution)
    planned.machine = replace(planned.machine, shared_memory=227 * 1024)
    monkeypatch.setattr(entry, "wanted", False)
    assert not entry.takes(x, 256, convolution)


def test_stages_are_sequences():
    model = network("gsa_resnet26", depths=(2, 1))
    assert [type(stage) for stage in model.stages] == [CompiledStage] * 2
    assert type(model.stages) is nn.Sequential
    assert type(model.stages[0][:1]) is CompiledStage
    plain = nn.Sequential(*model.stages[0])
    assert list(plain.state_dict()) == list(model.stages[0].state_dict())
    other = nn.Sequential(nn.Sequential(nn.ReLU()), plain)
    convert_blocks(other)
    assert type(other) is type(other[0]) is nn.Sequential


# --- On a GPU.


def test_network_on_gpu(gpu, monkeypatch):
    """As far from float64 as the network without it is, by the kernels."""
    model = network("gsa_resnet26", depths=(3, 2), widths=(64, 128), stem_width=64).cuda().to(memory_format=LAST)
    x = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=LAST)
    monkeypatch.setattr(expansion, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(expansion, "wanted", True)
    monkeypatch.setattr(pointwise, "MANY", 1)
    monkeypatch.setattr(pointwise, "wanted", False)
    with use_backend("reference"):
        exact = copy.deepcopy(model).double()
        expected = results(exact, exact, x.double())
    errors = []
    for on in (True, False):
        monkeypatch.setattr(entry, "wanted", on)
        monkeypatch.setattr(expansion_ops, "sums_wanted", on)
        monkeypatch.setattr(pointwise, "many_wanted", on)
        gpu.launched.clear()
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        with gpu.running(poison=False), torch.autocast("cuda", BF16):
            found = results(torch.compile(own, fullgraph=True), own, x)
        launched = [plan.kernel.entry for plan in gpu.launched]
        assert launched.count("map_channels") == (3 + 6 + 5 if on else 0)
        errors.append({key: relative_error(found[key], expected[key]) for key in expected if "." in key})
    torch._dynamo.reset()
    own, usual = (torch.tensor(list(one.values())) for one in errors)
    assert own.nanmedian() < 1.2 * usual.nanmedian()
    assert (own.nan_to_num() < 2 * usual.nan_to_num() + 0.02).all()
