"""A 1x1 convolution, batch norm, sum and ReLU without the map between them: against the layers in float64."""

import contextlib
import copy

import pytest
import torch
from functional.fused.test_kernels import BF16, FLOAT, HALF, counting_compilations, normal
from functional.fused.test_norms import train_step
from helpers import relative_error
from timm.layers import ConvNormAct
from timm.models.byobnet import BottleneckBlock, SelfAttnBlock
from torch import fx, nn

import gsanet
from gsanet.functional import use_backend
from gsanet.functional.fused import expansion, expansion_ops, pointwise
from gsanet.functional.fused.expansion import expand, takes
from gsanet.layers.batch_norm import CompiledBatchNormAct2d
from gsanet.layers.residual_block import CompiledBottleneckBlock, CompiledSelfAttnBlock

LAST = torch.channels_last


def make_layers(channels, out, **options):
    """A convolution and its norm, whose weights are of both signs, and one zero."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out, **options)
    if norm.affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        norm.weight.data[out // 2] = 0.0
    return nn.ModuleList([convolution, norm]).train()


def feature_map(dtype, *shape, seed=0, level=0.0, device="cpu"):
    """Pixels behind a ReLU, whose channels are correlated, about a level."""
    x = normal(*shape, dtype=FLOAT, seed=seed)
    x = (x + x.roll(1, 1)).relu() + level
    return x.to(device, dtype).to(memory_format=LAST)


def by_layers(layers, x, residual, relu):
    out = layers[1](layers[0](x))
    out = out if residual is None else out + residual
    return out.relu() if relu else out


def results(function, layers, x, residual, relu):
    """The output, and all gradients and buffers."""
    layers.zero_grad()
    x = x.detach().requires_grad_()
    residual = None if residual is None else residual.detach().requires_grad_()
    out = function(layers, x, residual, relu)
    d_out = normal(*out.shape, dtype=FLOAT, seed=9).to(out)
    out.backward(d_out)
    found = {"output": out.detach(), "x": x.grad, **({} if residual is None else {"residual": residual.grad})}
    found |= {name: one.grad for name, one in layers.named_parameters()}
    return found | {name: one.clone() for name, one in layers.named_buffers()}


def by_expansion(layers, x, residual, relu):
    return expand(x, *layers, residual, relu)


@pytest.mark.parametrize(
    ("options", "with_residual", "relu"),
    [({}, True, True), ({}, False, False), ({}, False, True), ({}, True, False), ({"affine": False}, True, True),
     ({"momentum": None}, True, True), ({"track_running_stats": False}, True, True)],
    ids=str,
)  # fmt: skip
def test_against_the_layers(options, with_residual, relu):
    layers = make_layers(8, 24, **options)
    exact = copy.deepcopy(layers).double()
    for seed in range(2):
        x = feature_map(FLOAT, 3, 8, 7, 6, seed=seed)
        residual = normal(3, 24, 7, 6, dtype=FLOAT, seed=seed + 5).to(memory_format=LAST) if with_residual else None
        found = results(by_expansion, layers, x, residual, relu)
        wide = None if residual is None else residual.double()
        expected = results(by_layers, exact, x.double(), wide, relu)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if value is not None and value.numel() > 1:
                assert relative_error(found[name], value) < 5e-6, name
        assert found["output"].is_contiguous(memory_format=LAST)
        assert found["x"].is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("level", [1.0, 10.0])
def test_pixels_far_from_zero(level):
    """The covariance is a difference: what it loses is the square of mean / deviation."""
    layers = make_layers(8, 24)
    x = feature_map(FLOAT, 3, 8, 17, 16, level=level)
    found = results(by_expansion, layers, x, None, False)
    expected = results(by_layers, copy.deepcopy(layers).double(), x.double(), None, False)
    for name in ("output", "x", "0.weight", "1.weight"):
        assert relative_error(found[name], expected[name]) < 4e-6 * (1 + level**2), name


def test_constant_channels():
    """A variance of nothing, which rounding may make less than that."""
    layers = make_layers(8, 24)
    out = expand(torch.full((2, 8, 5, 5), 0.7).to(memory_format=LAST), *layers)
    assert out.isfinite().all()
    assert torch.allclose(out, layers[1].bias[None, :, None, None].expand_as(out), atol=1e-2)


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_as_precise_as_the_layers(dtype):
    """In 16 bits, under autocast, as networks are trained; without a ReLU, which cuts outputs off by chance."""
    layers, x = make_layers(16, 64), feature_map(dtype, 4, 16, 14, 14)
    residual = normal(4, 64, 14, 14, dtype=dtype, seed=5).to(memory_format=LAST)
    exact = results(by_layers, copy.deepcopy(layers).double(), x.double(), residual.double(), False)
    with torch.autocast("cpu", dtype):
        usual = results(by_layers, copy.deepcopy(layers), x, residual, False)
        found = results(by_expansion, layers, x, residual, False)
    for name, value in exact.items():
        if value.numel() > 1:
            assert found[name].dtype == usual[name].dtype, name
            error, usual_error = (relative_error(one[name], value) for one in (found, usual))
            assert error < 1.2 * usual_error + 1e-3, name


def test_what_is_kept():
    """Neither what enters the norm nor anything else of its size but the output."""
    layers, x = make_layers(8, 24), feature_map(FLOAT, 3, 8, 7, 6).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda index: None):
        out = expand(x, *layers, torch.zeros(3, 24, 7, 6), relu=True)
    large = [tensor for tensor in kept if tensor is not None and tensor.numel() >= x.numel()]
    assert {tensor.data_ptr() for tensor in large} == {x.data_ptr(), out.data_ptr()}


def test_operators_are_registered_as_they_should_be():
    x, y = feature_map(FLOAT, 2, 8, 5, 4), feature_map(FLOAT, 2, 16, 5, 4, seed=1)
    torch.library.opcheck(expansion_ops.pixel_products, (x, y))
    torch.library.opcheck(expansion_ops.pixel_products, (x, None))
    weight, square, level = normal(16, 8, dtype=FLOAT), normal(8, 8, dtype=FLOAT), normal(8, dtype=FLOAT)
    torch.library.opcheck(expansion_ops.sum_of_products, (y, weight, x, square, level))
    rows = [normal(16, dtype=FLOAT, seed=seed) for seed in range(5)]
    leaves = [tensor.requires_grad_() for tensor in (x, weight, rows[0], rows[1], y)]
    moments = (weight.detach() * 2, rows[2], weight.detach() * 3, level, rows[3], rows[4])
    torch.library.opcheck(expansion_ops.expansion, (*leaves, *moments, True, False))


def test_products_by_kernels(kernels):
    """The operator where its kernels are the plan, of one map and of two."""
    x, y = (feature_map(BF16, 2, channels, 5, 4, seed=channels, device=kernels.device) for channels in (64, 256))
    with kernels.running():
        for other in (None, y):
            products, sums = expansion_ops.pixel_products(x, other)
            rows, others = (one.permute(0, 2, 3, 1).flatten(0, 2).double() for one in (x, x if other is None else y))
            assert relative_error(products, others.T @ rows) < 1e-5
            assert relative_error(sums, others.sum(0)) < 1e-5
    assert kernels.entries == {"pixel_products", "sum_pixel_products"}


def test_sums_by_a_kernel_beside_a_product(kernels):
    """Channels for which there is no plan: the product is PyTorch's, but not the sums."""
    x, y = (feature_map(BF16, 2, channels, 5, 4, seed=channels, device=kernels.device) for channels in (48, 24))
    with kernels.running():
        _, sums = expansion_ops.pixel_products(x, y)
        assert kernels.entries == {"channel_sums"}
        assert relative_error(sums, y.double().sum((0, 2, 3))) < 1e-5
        moved = torch.cat((y, y), 1)[:, 4:28]  # not at a multiple of 16 bytes
        assert relative_error(expansion_ops.pixel_products(x, moved)[1], moved.double().sum((0, 2, 3))) < 1e-5


@pytest.mark.parametrize("on", [False, True])
def test_end_of_a_block_by_kernel(kernels, monkeypatch, on):
    """The same as with PyTorch's operators, with a residual and a ReLU; without them it stays theirs."""
    for name, value in {"many_wanted": on, "MANY": 2 * 20 * 256, "wanted": False}.items():
        monkeypatch.setattr(pointwise, name, value)
    layers = [layer.to(kernels.device) for layer in make_layers(64, 256)]
    x, residual = (feature_map(BF16, 2, channels, 5, 4, seed=channels, device=kernels.device) for channels in (64, 256))
    exact = [copy.deepcopy(layer).double() for layer in layers]
    expected = torch.relu(exact[1](exact[0](x.double())) + residual.double())
    with kernels.running(), torch.autocast(kernels.device, BF16):
        assert relative_error(expand(x, *layers, residual, relu=True), expected) < 1e-2
        assert ("map_channels" in kernels.entries) == on
        kernels.launched.clear()
        expand(x, *layers, residual)
        expand(x, *layers, relu=True)
        assert "map_channels" not in kernels.entries


@pytest.mark.parametrize("on", [False, True])
def test_sum_of_products_by_kernel(kernels, monkeypatch, on):
    monkeypatch.setattr(expansion_ops, "sums_wanted", on)
    first, second = (
        feature_map(BF16, 2, channels, 5, 4, seed=channels, device=kernels.device) for channels in (256, 64)
    )
    weight, square, level = (
        normal(*shape, dtype=BF16, seed=i).to(kernels.device) for i, shape in enumerate([(256, 64), (64, 64), (64,)])
    )
    with kernels.running():
        found = expansion_ops.sum_of_products(first, weight, second, square, level)
    rows, others = (one.permute(0, 2, 3, 1).double() for one in (first, second))
    expected = (rows @ weight.double() + others @ square.double() + level.double()).permute(0, 3, 1, 2)
    assert found.is_contiguous(memory_format=LAST)
    assert relative_error(found, expected) < (2e-3 if on else 5e-3)  # rounded once, or twice
    assert kernels.entries == ({"map_channels"} if on else set())


# --- Where it is used.


@pytest.fixture
def wanted(kernels, monkeypatch):
    """Blocks of any size and dtype are computed so."""
    for name, value in {"wanted": True, "LEAST_NUMBERS": 1, "DTYPES": (BF16, HALF, FLOAT)}.items():
        monkeypatch.setattr(expansion, name, value)
    return kernels


def test_what_is_taken(as_on_gpu, monkeypatch):
    monkeypatch.setattr(expansion, "LEAST_NUMBERS", 2 * 24 * 7 * 6)
    layers, x = make_layers(8, 24), feature_map(BF16, 2, 8, 7, 6)
    with use_backend("fused"), torch.autocast("cpu", BF16):
        assert takes(x, *layers)
        assert not takes(x[:1], *layers)  # too small
        assert not takes(x.float(), *layers)
        assert not takes(x.half(), *layers)  # autocast says otherwise
        assert not takes(x.contiguous(), *layers)
        assert not takes(x, *make_layers(8, 15))  # not by eights
        assert not takes(x, *make_layers(16, 32))
        assert not takes(feature_map(BF16, 9, 16, 7, 6), *make_layers(16, 24))  # too few channels more
        assert not takes(x, *make_layers(8, 24).eval())
        monkeypatch.setattr(expansion, "MOST_CHANNELS_IN", 7)
        assert not takes(x, *layers)
        monkeypatch.setattr(expansion, "MOST_CHANNELS_IN", 8)
        monkeypatch.setattr(expansion, "wanted", False)
        assert not takes(x, *layers)
    monkeypatch.undo()
    with use_backend("torch"), torch.autocast("cpu", BF16):
        assert not takes(x, *layers)


def network(name, **options):
    torch.manual_seed(0)
    options = {
        "depths": (2, 1),
        "widths": (16, 32),
        "stem_width": 16,
        "num_classes": 4,
        "zero_init_last": False,
    } | options
    return gsanet.create_model(name, img_size=32, **options)


@contextlib.contextmanager
def compiled_steps(kernels, model):
    with counting_compilations() as (graphs, backend), kernels.running(poison=False):
        yield torch.compile(model, fullgraph=True, backend=backend), graphs


def count_calls(graphs):
    """Of the operator, in the one graph and the parts of it that torch.compile makes of operators with a gradient."""
    (graph,) = graphs
    nodes = [node for module in graph.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes]
    return sum("gsanet.expansion.default" in str(node.target) for node in nodes)


@pytest.mark.parametrize("name", ["gsa_resnet26", "conv_resnet26"])
def test_compiled_network(wanted, name):
    """Blocks and their shortcuts, one of them with a stride: outputs, gradients and statistics are the plain ones."""
    model = network(name).to(wanted.device)
    exact = copy.deepcopy(model).double()
    x = normal(4, 3, 32, 32, dtype=FLOAT).to(wanted.device, memory_format=LAST)
    with use_backend("reference"):
        expected = train_step(exact, x.double())
    with compiled_steps(wanted, model) as (compiled, graphs):
        found = train_step(compiled, x)
    assert count_calls(graphs) == 5  # three blocks, the shortcuts of two
    for key, value in expected.items():
        own = found[key if key == "output" else f"_orig_mod.{key}"]
        assert relative_error(own, value) < 2e-4, key


def count_expansions(kernels, model):
    x = normal(4, 3, 32, 32, dtype=FLOAT).to(kernels.device, memory_format=LAST)
    with compiled_steps(kernels, model.to(kernels.device)) as (compiled, graphs):
        compiled(x)
    return count_calls(graphs)


def test_where_blocks_stay_as_they_are(wanted):
    """In evaluation, with hooks, with dropped paths, and with other activations."""
    assert count_expansions(wanted, network("conv_resnet26").eval()) == 0
    dropping = network("conv_resnet26", drop_path_rate=0.5)  # all but the first block
    assert count_expansions(wanted, dropping) == 2
    assert count_expansions(wanted, network("conv_resnet26", act_layer="gelu")) == 0
    hooked = network("conv_resnet26")
    hooked.stages[0][1].conv3_1x1.bn.register_forward_hook(lambda *arguments: None)
    assert count_expansions(wanted, hooked) == 4
    frozen = network("conv_resnet26")
    frozen.stages[1].eval()
    assert count_expansions(wanted, frozen) == 3


def test_blocks_are_timms():
    model = network("gsa_resnet26", groups=(2,))
    blocks = [block for stage in model.stages for block in stage]
    assert [type(block) for block in blocks] == [CompiledBottleneckBlock] * 2 + [CompiledSelfAttnBlock]
    assert isinstance(blocks[0], BottleneckBlock)
    assert isinstance(blocks[2], SelfAttnBlock)
    x = normal(2, 16, 8, 8, dtype=FLOAT)
    plain = copy.deepcopy(blocks[0])
    plain.__class__ = BottleneckBlock
    assert torch.equal(plain(x), blocks[0](x))
    assert list(plain.state_dict()) == list(blocks[0].state_dict())


# --- On a GPU.


def residual_layers(channels, out):
    block = ConvNormAct(channels, out, 1, apply_act=False)
    CompiledBatchNormAct2d.convert(block)
    return block.cuda().to(memory_format=LAST).train()


@pytest.mark.parametrize(("batch", "size", "channels"), [(32, 56, 64), (64, 28, 128), (64, 14, 256)])
def test_inductor_on_gpu(gpu, batch, size, channels):
    torch.manual_seed(0)
    block = residual_layers(channels, 4 * channels)
    layers = nn.ModuleList([block.conv, block.bn])
    x = torch.randn(batch, channels, size, size, device="cuda").relu().to(BF16).to(memory_format=LAST)
    residual = torch.randn(batch, 4 * channels, size, size, device="cuda").to(BF16).to(memory_format=LAST)
    exact = results(by_layers, copy.deepcopy(layers).double(), x.double(), residual.double(), True)
    with gpu.running(poison=False), torch.autocast("cuda", BF16):
        usual = results(by_layers, copy.deepcopy(layers), x, residual, True)
        torch._dynamo.reset()
        compiled = torch.compile(by_expansion, fullgraph=True)
        found = results(compiled, layers, x, residual, True)
        again = results(compiled, layers, x, residual, True)
    torch._dynamo.reset()
    for name, value in exact.items():
        if value.numel() > 1:
            error, usual_error = (relative_error(one[name], value) for one in (found, usual))
            assert error < 1.2 * usual_error + 1e-3, name
            assert "running" in name or torch.equal(found[name], again[name]), name


def test_network_on_gpu(gpu, monkeypatch):
    """As far from float64 as the network without it is."""
    model = network("gsa_resnet26", widths=(64, 64)).cuda().to(memory_format=LAST)
    x = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=LAST)
    monkeypatch.setattr(expansion, "LEAST_NUMBERS", 1)
    with use_backend("reference"):
        expected = train_step(copy.deepcopy(model).double(), x.double())
    errors = []
    for on in (True, False):
        monkeypatch.setattr(expansion, "wanted", on)
        torch._dynamo.reset()
        with gpu.running(poison=False), torch.autocast("cuda", BF16):
            found = train_step(torch.compile(copy.deepcopy(model), fullgraph=True), x)
        errors.append({key: relative_error(found[f"_orig_mod.{key}"], expected[key]) for key in expected if "." in key})
    torch._dynamo.reset()
    early, usual = (torch.tensor(list(one.values())) for one in errors)
    assert early.nanmedian() < 1.2 * usual.nanmedian()
    assert (early.nan_to_num() < 2 * usual.nan_to_num() + 0.02).all()
