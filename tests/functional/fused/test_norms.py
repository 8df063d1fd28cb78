"""The operators around batch norms against PyTorch's own layers in float64: outputs, gradients and statistics.

As in `test_kernels`, each test runs the kernels' own source on the host stand-in and, where there is one, on a GPU:

    python -m pytest -n 8 -k gpu tests/functional/fused/test_norms.py
"""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from functional.fused.test_kernels import (
    BF16,
    FLOAT,
    HALF,
    check_close,
    count_operator,
    counting_compilations,
    normal,
    same_bits,
)
from helpers import batch_norms, relative_error
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from timm.models import create_feature_extractor
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import gsanet
from gsanet.functional import use_backend
from gsanet.functional.fused import norm_ops, norms
from gsanet.functional.fused.plan import Machine
from gsanet.inference.blocks import InferenceMaxPool2d
from gsanet.layers.batch_norm import CompiledBatchNormAct2d

LAST = torch.channels_last


def feature_map(kernels, dtype, *shape, seed=0):
    return normal(*shape, dtype=dtype, seed=seed).to(kernels.device, memory_format=LAST)


def affine(kernels, channels):
    """Weight, bias and centre of a norm; some weights are negative, one is zero."""
    weight = normal(channels, dtype=FLOAT, seed=5)
    weight[channels // 2] = 0.0
    return [
        one.to(kernels.device)
        for one in (weight, normal(channels, dtype=FLOAT, seed=6), normal(channels, dtype=FLOAT, seed=7))
    ]


def exact_statistics(x, weight, bias, epsilon):
    x = x.double()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    inverse = (variance + epsilon).rsqrt()
    scale = inverse * (1.0 if weight is None else weight.double())
    shift = (0.0 if bias is None else bias.double()) - mean * scale
    return torch.stack((scale, shift, mean, inverse, variance))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (FLOAT, (2, 64, 9, 7)),
        (BF16, (2, 64, 9, 7)),
        (HALF, (2, 64, 9, 7)),
        (BF16, (3, 8, 31, 29)),  # one group of channels: every thread a row
        (FLOAT, (1, 8, 1, 2)),
        (BF16, (2, 72, 13, 5)),  # threads are left over
        (BF16, (2, 296, 9, 8)),  # slices that are not full
        (FLOAT, (2, 264, 6, 5)),
        (BF16, (1, 520, 3, 3)),
        (BF16, (4, 256, 14, 14)),  # several rounds of a block
    ],
    ids=str,
)
def test_channel_statistics(kernels, dtype, shape):
    x = 3 + feature_map(kernels, dtype, *shape) * 2
    weight, bias, centre = affine(kernels, shape[1])
    with kernels.running():
        found = norm_ops.channel_statistics(x, centre, weight, bias, 1e-3)
        for name, one, other in zip(
            ("scale", "shift", "mean", "inverse", "variance"),
            found,
            exact_statistics(x, weight, bias, 1e-3),
            strict=True,
        ):
            check_close(name, one, other, FLOAT)
        assert kernels.entries == {"channel_sums", "norm_statistics"}
        for _ in kernels.other_orders():
            assert torch.equal(norm_ops.channel_statistics(x, centre, weight, bias, 1e-3), found), kernels.order
        without = norm_ops.channel_statistics(x, centre, None, None, 1e-3)
    check_close("without weights", without, exact_statistics(x, None, None, 1e-3), FLOAT)


@pytest.mark.parametrize("kernels", ["host"], indirect=True)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_channel_statistics_on_other_machines(kernels, multiprocessors):
    kernels.machine = Machine(multiprocessors, 227 * 1024, 228 * 1024)
    x = feature_map(kernels, BF16, 5, 64, 20, 21)
    with kernels.running():
        found = norm_ops.channel_statistics(x, torch.zeros(64), None, None, 1e-5)
    check_close("statistics", found, exact_statistics(x, None, None, 1e-5), FLOAT)


def test_blocks_that_sum_fit_beside_the_cache(planned):
    planned.machine = Machine(132, 227 * 1024, 228 * 1024)
    for dtype in (FLOAT, BF16):
        norm_ops.channel_statistics(torch.zeros(2, 256, 8, 8, dtype=dtype), torch.zeros(256), None, None, 1e-5)
    for plan in planned.launched:
        if plan.kernel.entry == "channel_sums":
            room = plan.carveout / 100 * planned.machine.shared_memory_in_all
            assert dict(plan.kernel.constants)["BLOCKS"] * (plan.shared_bytes + 1024) <= room < 100 * 1024


def test_a_centre_that_is_not_at_16_bytes(kernels):
    x = feature_map(kernels, FLOAT, 2, 16, 5, 5)
    centre = normal(17, dtype=FLOAT).to(kernels.device)[1:]
    with kernels.running():
        found = norm_ops.channel_statistics(x, centre, None, None, 1e-5)
    check_close("statistics", found, exact_statistics(x, None, None, 1e-5), FLOAT)


def test_statistics_of_a_mean_far_from_zero(kernels):
    x = (1000 + normal(4, 16, 9, 9)).float().to(kernels.device)
    with kernels.running():
        found = norm_ops.channel_statistics(x, torch.full((16,), 1000.0, device=x.device), None, None, 0.0)
    check_close("variance", found[4], exact_statistics(x, None, None, 0.0)[4], FLOAT)


def exact_gradient(d_out, x, applied, relu):
    """Of a norm whose weights are such that it applies this: a, b and c, and the gradients of weight and bias."""
    scale, shift, mean, inverse, _ = (row.double().view(1, -1, 1, 1) for row in applied)
    x, d_out = x.double(), d_out.double()
    if relu:
        d_out = torch.where(x * scale + shift > 0, d_out, 0)
    d_weight, d_bias = (d_out * (x - mean) * inverse).sum((0, 2, 3)), d_out.sum((0, 2, 3))
    scale, mean, inverse = (one.flatten() for one in (scale, mean, inverse))
    count = x.numel() // x.shape[1]
    slope = -scale * inverse * d_weight / count
    return torch.stack((scale, slope, -scale * d_bias / count - slope * mean, d_weight, d_bias))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (FLOAT, (2, 64, 9, 7)),
        (BF16, (2, 64, 9, 7)),
        (HALF, (1, 8, 1, 2)),
        (BF16, (2, 296, 9, 8)),  # slices that are not full, threads that are left over
        (BF16, (4, 256, 14, 14)),  # several rounds of a block
    ],
    ids=str,
)
def test_norm_gradient(kernels, dtype, shape, relu):
    x, d_out = feature_map(kernels, dtype, *shape), feature_map(kernels, dtype, *shape, seed=1)
    weight, bias, _ = affine(kernels, shape[1])
    applied = exact_statistics(x, weight, bias, 0.1).float()
    with kernels.running():
        found = norm_ops.norm_gradient(d_out, x, applied, relu)
        assert kernels.entries == {"norm_sums", "norm_gradient"}
        for _ in kernels.other_orders():
            assert torch.equal(norm_ops.norm_gradient(d_out, x, applied, relu), found), kernels.order
    for name, one, other in zip("abcwb", found, exact_gradient(d_out, x, applied, relu), strict=True):
        check_close(name, one, other, FLOAT)


def test_what_is_not_a_number_passes_a_closed_norm(kernels):
    """Of a map that is not finite no gradient is: nothing hides it."""
    x, d_out = feature_map(kernels, FLOAT, 2, 8, 3, 3), feature_map(kernels, FLOAT, 2, 8, 3, 3, seed=1)
    applied = exact_statistics(x, None, None, 0.1).float()
    applied[1] -= 100.0  # all is closed
    x[1, 2, 0, 1] = float("nan")
    with kernels.running():
        found = norm_ops.norm_gradient(d_out, x, applied, True)
    assert torch.equal(found[1].isnan(), torch.arange(8, device=x.device) == 2)


def plain_pool(x, weight, bias, epsilon=1e-5):
    out = F.batch_norm(x, None, None, weight, bias, True, 0.0, epsilon)
    return F.max_pool2d(out.relu(), 3, 2, 1)


def norm_pool(x, weight, bias, centre, epsilon=1e-5):
    return norm_ops.norm_relu_max_pool(x, centre, weight, bias, epsilon)[0]


def gradients(function, x, weight, bias, d_out):
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in (x, weight, bias)]
    out = function(*leaves)
    wanted = [one for one in leaves if one is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, d_out.to(out.dtype))]


def check_pool(kernels, dtype, shape, *, with_norm=True, x=None, d_out=None):
    batch, channels, height, width = shape
    x = feature_map(kernels, dtype, *shape) if x is None else x
    weight, bias, centre = affine(kernels, channels)
    if not with_norm:
        weight = bias = None
    if d_out is None:
        d_out = feature_map(kernels, dtype, batch, channels, -(-height // 2), -(-width // 2), seed=3)
    exact = [None if one is None else one.double() for one in (x, weight, bias)]
    expected = gradients(plain_pool, *exact, d_out.double())
    with kernels.running():
        found = gradients(lambda *leaves: norm_pool(*leaves, centre), x, weight, bias, d_out)
        assert kernels.entries == {
            "channel_sums", "norm_statistics", "norm_pool", "norm_pool_sums", "norm_gradient", "norm_pool_gradient",
        }  # fmt: skip
        assert found[0].dtype == found[1].dtype == dtype
        assert all(one.is_contiguous(memory_format=LAST) for one in found[:2])
        names = ("output", "gradient of x", "gradient of the weight", "gradient of the bias")
        for name, one, other in zip(names[: len(found)], found, expected, strict=True):
            check_close(name, one, other, dtype)
        for _ in kernels.other_orders():
            again = gradients(lambda *leaves: norm_pool(*leaves, centre), x, weight, bias, d_out)
            assert same_bits(again, found), f"{kernels.order} order differs"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (FLOAT, (2, 64, 12, 10)),
        (BF16, (2, 64, 12, 10)),
        (HALF, (2, 64, 12, 10)),
        (FLOAT, (2, 16, 9, 7)),
        (BF16, (2, 16, 7, 8)),
        (BF16, (2, 8, 8, 9)),
        (FLOAT, (3, 8, 1, 5)),
        (BF16, (3, 24, 5, 1)),
        (FLOAT, (3, 8, 2, 2)),
        (FLOAT, (5, 40, 1, 1)),
        (BF16, (1, 72, 40, 33)),
    ],
    ids=str,
)
def test_norm_relu_max_pool(kernels, dtype, shape):
    check_pool(kernels, dtype, shape)


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_norm_relu_max_pool_without_weights(kernels, dtype):
    check_pool(kernels, dtype, (2, 16, 9, 10), with_norm=False)


@pytest.mark.parametrize("kernels", ["host"], indirect=True)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_norm_relu_max_pool_on_other_machines(kernels, multiprocessors):
    """Threads walk down many rows of windows, or one."""
    kernels.machine = Machine(multiprocessors, 227 * 1024, 228 * 1024)
    check_pool(kernels, FLOAT, (2, 16, 37, 34))
    check_pool(kernels, BF16, (20, 64, 35, 6))


VIEWS = {
    "channels first": lambda x: x.contiguous(),
    "every second pixel": lambda x: x[:, :, ::2, ::2],
    "not at 16 bytes": lambda x: x[:, 1:9],
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_maps(kernels, view):
    x = VIEWS[view](feature_map(kernels, FLOAT, 2, 16, 9, 10))
    if view != "one number":  # a map of one number has no variance
        check_pool(kernels, FLOAT, tuple(x.shape), x=x)
        with kernels.running():
            weight, bias, centre = affine(kernels, x.shape[1])
            found = norm_ops.channel_statistics(x, centre, weight, bias, 1e-5)
        check_close("statistics", found, exact_statistics(x, weight, bias, 1e-5), FLOAT)
    d_out = VIEWS[view](feature_map(kernels, FLOAT, 2, 16, 9, 10, seed=3))
    batch, channels, height, width = d_out.shape
    check_pool(kernels, FLOAT, (batch, channels, 2 * height, 2 * width - 1), d_out=d_out)


def test_of_equal_values_the_first_is_the_maximum(kernels):
    """Few different values: most windows have several maxima, as they have in float64."""
    x = normal(4, 16, 11, 10).round().to(kernels.device, FLOAT)
    check_pool(kernels, FLOAT, tuple(x.shape), x=x)
    check_pool(kernels, BF16, tuple(x.shape), x=x.to(BF16))


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_not_a_number_is_the_maximum(kernels, dtype):
    x = feature_map(kernels, dtype, 2, 16, 8, 9)
    x[1, 3, 4, 4] = float("nan")
    weight, bias, centre = affine(kernels, 16)
    with kernels.running():
        out = norm_pool(x, weight, bias, centre)
        assert out[:, 3].isnan().all()  # the statistics are those of a channel
        others = [i for i in range(16) if i != 3]
        assert out[:, others].isfinite().all()


def make_norm(kernels, dtype=FLOAT, **options):
    norm = nn.BatchNorm2d(16, **options)
    if norm.affine:
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
        nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(1))
    return norm.to(kernels.device, dtype)


NORMS = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.0, "eps": 0.1},
]


@pytest.mark.parametrize("options", NORMS, ids=str)
def test_norm_and_pool_keep_running_statistics(kernels, options):
    norm = make_norm(kernels, **options)
    exact = copy.deepcopy(norm).double()
    for seed in range(3):
        x = 1 + feature_map(kernels, FLOAT, 2, 16, 7, 6, seed=seed)
        with kernels.running():
            assert norms.takes(x, norm)
            out = norms.norm_relu_max_pool(x, norm)
        check_close("output", out, F.max_pool2d(exact(x.double()).relu(), 3, 2, 1), FLOAT)
    for name, buffer in norm.named_buffers():
        check_close(name, buffer, dict(exact.named_buffers())[name], FLOAT)


@pytest.mark.parametrize("channels", [8, 512, 1040])
def test_what_a_norm_keeps(kernels, channels):
    """For the first and the last channel of a block, and more than a block has; other orders give the same bits."""
    applied = normal(5, channels, dtype=FLOAT, seed=1).abs().to(kernels.device)

    def keep(times):
        kept = torch.zeros(channels), torch.ones(channels), torch.tensor(2**32)
        kept = [one.to(kernels.device) for one in kept]
        with kernels.running():
            for _ in range(times):
                norm_ops.keep_statistics(*kept, applied, 6, 0.1)
        return kept

    mean, variance, batches = keep(2)
    check_close("mean", mean, 0.19 * applied[2].double(), FLOAT)
    check_close("variance", variance, 0.81 + 0.19 * 1.2 * applied[4].double(), FLOAT)
    assert batches == 2**32 + 2
    for _ in kernels.other_orders():
        assert same_bits(keep(2), (mean, variance, batches))
    assert kernels.entries == {"keep_statistics"}


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: setattr(norm, "momentum", None),
        lambda norm: norm.bfloat16(),
        lambda norm: setattr(norm, "num_batches_tracked", None),
        lambda norm: setattr(norm, "running_var", None),
        lambda norm: setattr(norm, "running_mean", torch.zeros(32)[::2]),
    ],
)
def test_what_is_kept_without_the_kernel(planned, change):
    norm = nn.BatchNorm2d(16)
    norms.keep_statistics(norm, torch.zeros(5, 16), 32)
    assert planned.entries == {"keep_statistics"}
    planned.launched.clear()
    change(norm)
    norms.keep_statistics(norm, torch.zeros(5, 16), 32)
    assert not planned.launched


def test_norm_and_pool_keep_statistics_as_batch_norms_do(kernels):
    for words, norm in batch_norms(16):
        norm.to(kernels.device)
        exact = copy.deepcopy(norm).double()
        x = 1 + feature_map(kernels, FLOAT, 2, 16, 7, 6)
        with kernels.running():
            assert norms.takes(x, norm) == norm.training
            if norm.training:
                norms.norm_relu_max_pool(x, norm)
                exact(x.double())
        expected = dict(exact.named_buffers())
        for name, buffer in norm.named_buffers():
            check_close(f"{name}, {words}", buffer, expected[name], FLOAT)


def stem_network(**options):
    torch.manual_seed(0)
    options = {"depths": (1, 1), "widths": (8, 8), "stem_width": 16, "num_classes": 4} | options
    network = gsanet.create_model("conv_resnet26", img_size=32, **options)
    nn.init.normal_(network.stem.conv1.bn.weight)
    return network


def train_step(network, x):
    network.zero_grad()
    out = network(x)
    out.square().sum().backward()
    found = {"output": out.detach()} | {name: one.grad for name, one in network.named_parameters()}
    return found | {name: one.clone() for name, one in network.named_buffers()}


def test_stem_in_training(kernels):
    network = stem_network().to(kernels.device)
    exact = copy.deepcopy(network).double()
    x = feature_map(kernels, FLOAT, 3, 3, 30, 27)
    with use_backend("torch"):
        expected = train_step(exact, x.double())
    assert not kernels.launched
    with kernels.running():
        found = train_step(network, x)
    assert {"norm_pool", "norm_pool_gradient"} <= kernels.entries
    for name, value in found.items():
        check_close(name, value, expected[name], FLOAT)


def test_stem_is_as_timms(kernels):
    network = stem_network()
    stem = timm.models.byobnet.create_byob_stem(3, 16, "7x7", "maxpool")[0]
    assert list(network.stem.state_dict()) == list(stem.state_dict())
    stem.load_state_dict(network.stem.state_dict())
    assert [name for name, _ in network.stem.named_modules()] == [name for name, _ in stem.named_modules()]
    assert isinstance(network.stem, type(stem))
    x = normal(2, 3, 32, 32, dtype=FLOAT)
    with kernels.running():
        assert torch.equal(network.stem.eval()(x), stem.eval()(x))
    assert not kernels.launched


def hook(module, *_):
    return None


@pytest.mark.parametrize(
    "change",
    [
        lambda stem: stem.conv1.register_forward_hook(hook),
        lambda stem: stem.conv1.bn.register_forward_pre_hook(hook),
        lambda stem: stem.conv1.bn.act.register_forward_hook(hook),
        lambda stem: stem.pool.register_forward_pre_hook(hook),
        lambda stem: stem.pool.register_full_backward_hook(lambda *_: None),
        lambda stem: setattr(stem.conv1.bn, "act", nn.SiLU()),
        lambda stem: setattr(stem.conv1.bn, "forward", stem.conv1.bn.forward),
        lambda stem: setattr(stem.conv1, "bn", convert_sync_batchnorm(stem.conv1.bn)),
        lambda stem: setattr(stem, "pool", nn.MaxPool2d(2)),
        lambda stem: setattr(stem, "pool", nn.AvgPool2d(3, 2, 1)),
        lambda stem: setattr(stem.pool, "ceil_mode", True),
        lambda stem: stem.conv1.bn.eval(),
        lambda stem: stem.eval(),
        lambda stem: stem.double(),
    ],
)
def test_stem_with_other_layers(planned, change):
    """Where the operator would do something else, or someone looks on, PyTorch's layers are called."""
    stem = stem_network().stem
    x = torch.zeros(2, 3, 16, 16).to(memory_format=LAST)
    stem(x)
    assert planned.entries == {"channel_sums", "norm_statistics", "keep_statistics", "norm_pool"}
    planned.launched.clear()
    change(stem)
    stem(x.to(stem.conv1.conv.weight.dtype))
    assert not planned.launched


def test_maps_that_are_not_taken(planned):
    norm = nn.BatchNorm2d(16)
    x = torch.zeros(2, 16, 4, 4).to(memory_format=LAST)
    assert norms.takes(x, norm)
    assert not norms.takes(x.contiguous(), norm)
    with use_backend("torch"):
        assert not norms.takes(x, norm)
    assert not norms.takes(x[:0], norm)
    assert not norms.takes(x[:1, :, :1, :1].contiguous(memory_format=LAST), norm)
    assert not norms.takes(x[:, :8].contiguous(memory_format=LAST), norm)
    assert not norms.takes(x[:, :12].contiguous(memory_format=LAST), nn.BatchNorm2d(12))
    assert not norms.takes(x.double(), norm)
    assert not norms.takes(x, nn.BatchNorm2d(16, device="meta"))
    assert not norms.takes(x, norm.eval())


def test_stem_as_features(kernels):
    """The map before the pooling can be had as from timm's stem, and is the same."""
    network = stem_network().to(kernels.device)
    x = feature_map(kernels, FLOAT, 2, 3, 32, 32)
    with kernels.running():
        pooled, before = copy.deepcopy(network).stem.forward_intermediates(x)
        assert before.shape == (2, 16, 16, 16)
        assert not kernels.launched
        check_close("pooled", copy.deepcopy(network).stem(x), pooled, FLOAT)
        assert kernels.launched
        kernels.launched.clear()
        seen = []
        network.stem.conv1.register_forward_hook(lambda module, arguments, out: seen.append(out))
        network.stem(x)
        assert torch.equal(seen[0], before)
        assert not kernels.launched
        extracted = create_feature_extractor(stem_network().to(kernels.device), ["stem.conv1.bn", "stem.pool"])(x)
        check_close("extracted", extracted["stem.conv1.bn"], before, FLOAT)


def test_stem_under_autocast(kernels):
    network = stem_network().to(kernels.device)
    x = feature_map(kernels, FLOAT, 2, 3, 32, 32)
    with kernels.running(), torch.autocast(kernels.device, dtype=BF16):
        out = network.stem(x)
    assert out.dtype == BF16
    assert {constants["SCALAR"] for constants in kernels.constants("norm_pool")} == {"bf16"}
    with use_backend("torch"):
        check_close("output", out, network.stem(x), BF16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_stem_compiled(kernels, dynamic):
    stem = stem_network().stem.to(kernels.device)
    usual = copy.deepcopy(stem)
    with counting_compilations() as (graphs, backend), kernels.running(poison=False):
        compiled = torch.compile(stem, fullgraph=True, backend=backend)
        for seed in range(3):
            x = feature_map(kernels, FLOAT, 2 + seed * dynamic, 3, 32, 32, seed=seed)
            found = train_step(compiled, x)
            for name, value in train_step(usual, x).items():
                own = found[name if name == "output" else f"_orig_mod.{name}"]
                # For any batch, older versions of PyTorch take the convolution's output for channels-first.
                assert torch.equal(own, value) or (dynamic and relative_error(own, value) < 1e-5), name
        assert len(graphs) == 1 + dynamic
        assert "norm_relu_max_pool" in graphs[0].code


def operators_and_arguments(device):
    x = normal(2, 16, 5, 6, dtype=FLOAT).to(device, memory_format=LAST).requires_grad_()
    weight, bias, centre = (normal(16, dtype=FLOAT, seed=i).to(device) for i in range(3))
    weight.requires_grad_(), bias.requires_grad_()
    yield norm_ops.channel_statistics, (x.detach(), centre, weight.detach(), bias.detach(), 1e-5)
    yield norm_ops.channel_statistics, (x.detach(), centre, None, None, 1e-5)
    applied = normal(5, 16, dtype=FLOAT).to(device)
    kept = applied[2].clone(), applied[4].clone(), torch.tensor(0, device=device)
    yield norm_ops.keep_statistics, (*kept, applied, 60, 0.1)
    yield norm_ops.norm_gradient, (x.detach() + 1, x.detach(), applied, True)
    yield norm_ops.norm_relu_max_pool, (x, centre, weight, bias, 1e-5)
    yield norm_ops.norm_relu_max_pool, (x.detach().contiguous().requires_grad_(), centre, None, None, 1e-5)
    out, *kept = norm_ops.norm_relu_max_pool(x.detach(), centre, None, None, 1e-5)
    yield norm_ops.norm_relu_max_pool_gradient, (torch.ones_like(out), x.detach(), *kept)


def test_operators_are_registered_as_they_should_be(kernels):
    with kernels.running(poison=False):
        for operator, arguments in operators_and_arguments(kernels.device):
            torch.library.opcheck(operator, arguments)


def test_cuda_graph_of_the_stem_on_gpu(gpu):
    stem = stem_network().stem.cuda()
    eager = copy.deepcopy(stem)
    x = torch.zeros(2, 3, 32, 32, device="cuda").to(memory_format=LAST)
    with gpu.running(poison=False):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.deepcopy(stem)(x).sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = stem(x)
            found = torch.autograd.grad(out.square().sum(), list(stem.parameters()))
        for seed in range(3):
            x.copy_(normal(2, 3, 32, 32, dtype=FLOAT, seed=seed))
            graph.replay()
            usual = train_step(eager, x)
            assert torch.equal(out, usual["output"])
            # cuDNN may choose another algorithm for the convolution's gradient.
            for (name, _), gradient in zip(stem.named_parameters(), found, strict=True):
                check_close(name, gradient, usual[name], FLOAT)


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_a_large_stem_on_gpu(gpu, dtype):
    check_pool(gpu, dtype, (16, 64, 112, 112))
    check_pool(gpu, dtype, (5, 72, 113, 101))


# --- Batch norms that torch.compile trains.


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("options", NORMS, ids=str)
def test_batch_norm(kernels, dtype, options, relu):
    norm = make_norm(kernels, **options)
    exact = copy.deepcopy(norm).double()
    for seed in range(2):
        x = (1 + feature_map(kernels, FLOAT, 3, 16, 7, 6, seed=seed)).to(dtype).requires_grad_()
        d_out = feature_map(kernels, dtype, 3, 16, 7, 6, seed=5)
        norm.zero_grad(), exact.zero_grad()
        with kernels.running():
            out = norms.batch_norm(x, norm, relu)
            out.backward(d_out)
        assert out.dtype == dtype
        exact_x = x.detach().double().requires_grad_()
        expected = exact(exact_x).relu() if relu else exact(exact_x)
        expected.backward(d_out.double())
        check_close("output", out.detach(), expected.detach(), dtype)
        check_close("gradient of x", x.grad, exact_x.grad, dtype)
        for name, parameter in norm.named_parameters():
            assert parameter.grad.dtype == FLOAT
            check_close(name, parameter.grad, exact.get_parameter(name).grad, dtype)
    for name, buffer in norm.named_buffers():
        check_close(name, buffer, dict(exact.named_buffers())[name], FLOAT)


def test_only_the_input_of_a_norm_and_relu_is_kept(kernels):
    norm, x = make_norm(kernels), feature_map(kernels, FLOAT, 3, 16, 7, 6).requires_grad_()
    kept = []
    with kernels.running(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda index: None):
        norms.batch_norm(x, norm, relu=True)
    assert {tensor.data_ptr() for tensor in kept if tensor.numel() >= x.numel()} == {x.data_ptr()}


def residual(block):
    """Norms with a ReLU and without, and a sum between, as a residual block has them."""
    first, second = block

    def forward(x):
        return torch.relu(second(first(x)) + x)

    return forward


def make_residual(device, **options):
    torch.manual_seed(0)
    block = nn.ModuleList([BatchNormAct2d(16, **options), BatchNormAct2d(16, apply_act=False, **options)])
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    CompiledBatchNormAct2d.convert(block)
    assert {type(module) for module in block} == {CompiledBatchNormAct2d}
    return block.to(device).train()


@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=str)
def test_compiled_batch_norms(kernels, options):
    block = make_residual(kernels.device, **options)
    exact = copy.deepcopy(block).double()
    with counting_compilations() as (graphs, backend), kernels.running(poison=False):
        compiled = torch.compile(residual(block), fullgraph=True, backend=backend)
        for seed in range(3):
            x = feature_map(kernels, FLOAT, 3, 16, 7, 6, seed=seed).requires_grad_()
            exact_x = x.detach().double().requires_grad_()
            block.zero_grad(), exact.zero_grad()
            out, expected = compiled(x), residual(exact)(exact_x)
            out.square().sum().backward(), expected.square().sum().backward()
            check_close("output", out.detach(), expected.detach(), FLOAT)
            check_close("gradient of x", x.grad, exact_x.grad, FLOAT)
            for name, parameter in block.named_parameters():
                check_close(name, parameter.grad, exact.get_parameter(name).grad, FLOAT)
            for name, buffer in block.named_buffers():
                check_close(name, buffer, dict(exact.named_buffers())[name], FLOAT)
        assert len(graphs) == 1
        by_kernel = "momentum" not in options
        assert count_operator(graphs[0], "channel_statistics") == 2
        assert count_operator(graphs[0], "keep_statistics") == 2 * by_kernel
    others = {"channel_sums", "norm_statistics", "norm_sums", "norm_gradient"}
    assert kernels.entries == others | ({"keep_statistics"} if by_kernel else set())


def test_batch_norms_that_are_not_compiled_are_timms(kernels):
    block = make_residual(kernels.device)
    plain = copy.deepcopy(block)
    for module in plain:
        module.__class__ = BatchNormAct2d
    assert list(block.state_dict()) == list(plain.state_dict())
    x = feature_map(kernels, FLOAT, 3, 16, 7, 6)
    with kernels.running(poison=False):
        assert torch.equal(residual(block)(x), residual(plain)(x))
        with counting_compilations() as (_, backend):
            compiled = torch.compile(residual(block.eval()), fullgraph=True, backend=backend)
            torch.testing.assert_close(compiled(x), residual(plain.eval())(x))
    assert not kernels.launched


def test_batch_norms_are_converted_to_others():
    network = stem_network()
    assert isinstance(network.stem.conv1.bn, CompiledBatchNormAct2d)
    synchronised = convert_sync_batchnorm(copy.deepcopy(network))
    assert isinstance(synchronised.stem.conv1.bn, nn.SyncBatchNorm)
    assert type(synchronised.stem.conv1.bn.act) is nn.ReLU
    assert not any(isinstance(module, CompiledBatchNormAct2d) for module in synchronised.modules())
    by_torch = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(network))
    assert type(by_torch.stem.conv1.bn) is nn.SyncBatchNorm  # as timm's norms: it does not know of their activations
    frozen = timm.layers.freeze_batch_norm_2d(copy.deepcopy(network))
    x = normal(2, 3, 32, 32, dtype=FLOAT)
    assert torch.allclose(frozen(x), network.eval()(x), atol=1e-5)


@pytest.mark.parametrize("name", ["gsa_resnet26", "conv_resnet26"])
def test_compiled_network(kernels, name):
    """A whole network in one graph: its outputs, gradients and running statistics are those of the plain path."""
    torch.manual_seed(0)
    options = {"depths": (1, 1), "widths": (16, 16), "stem_width": 16, "num_classes": 4, "zero_init_last": False}
    network = gsanet.create_model(name, img_size=32, **options).to(kernels.device)
    exact = copy.deepcopy(network).double()
    x = feature_map(kernels, FLOAT, 4, 3, 32, 32)
    with use_backend("reference"):
        expected = train_step(exact, x.double())
    with counting_compilations() as (graphs, backend), kernels.running(poison=False):
        found = train_step(torch.compile(network, fullgraph=True, backend=backend), x)
    assert len(graphs) == 1
    norm_count = sum(isinstance(module, CompiledBatchNormAct2d) for module in network.modules())
    assert len(kernels.constants("channel_sums")) == norm_count
    assert len(kernels.constants("norm_pool_gradient")) == 1
    for key, value in expected.items():
        own = found[key if key == "output" else f"_orig_mod.{key}"]
        assert relative_error(own, value) < 2e-4, key


def test_inductor_on_gpu(gpu):
    network = stem_network(depths=(1, 1), widths=(16, 16)).cuda().to(memory_format=LAST)
    exact = copy.deepcopy(network).double()
    x = feature_map(gpu, FLOAT, 4, 3, 32, 32)
    with use_backend("reference"):
        expected = train_step(exact, x.double())
    torch._dynamo.reset()
    with gpu.running(poison=False):
        found = train_step(torch.compile(network, fullgraph=True), x)
    assert {"channel_sums", "norm_pool", "norm_pool_gradient"} <= gpu.entries
    for key, value in expected.items():
        assert relative_error(found[key if key == "output" else f"_orig_mod.{key}"], value) < 1e-3, key
    torch._dynamo.reset()


# --- Max pooling in inference.


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(FLOAT, (2, 16, 9, 10)), (BF16, (2, 64, 8, 7)), (HALF, (1, 8, 1, 1)), (BF16, (3, 72, 40, 2))],
    ids=str,
)
def test_max_pool(kernels, dtype, shape):
    x = feature_map(kernels, dtype, *shape)
    x[0, 1] = -float("inf")
    x[0, 2, 0, 0] = float("nan")
    expected = F.max_pool2d(x, 3, 2, 1)
    with kernels.running():
        out = norms.max_pool(x)
        assert out.is_contiguous(memory_format=LAST)
        assert torch.equal(out.nan_to_num(9.0), expected.nan_to_num(9.0))
        for _ in kernels.other_orders():
            assert torch.equal(norms.max_pool(x).nan_to_num(9.0), out.nan_to_num(9.0))
    assert kernels.entries == {"norm_pool"}


def test_max_pool_of_what_the_kernel_does_not_take(planned):
    taken = torch.zeros(2, 16, 8, 8).to(memory_format=LAST)
    for x in (
        taken.contiguous(),
        taken[:, :12].contiguous(memory_format=LAST),
        taken.double(),
        taken[0],
        taken[:0],
        taken.clone().requires_grad_(),
    ):
        assert norms.max_pool(x).shape == F.max_pool2d(x, 3, 2, 1).shape
    assert not planned.launched
    norms.max_pool(taken)
    assert planned.entries == {"norm_pool"}


def test_max_pool_of_a_fused_network(kernels):
    network = stem_network().to(kernels.device).eval()
    fused = gsanet.fuse_for_inference(network)
    assert type(fused.stem.pool) is InferenceMaxPool2d
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    x = feature_map(kernels, FLOAT, 2, 3, 32, 32)
    with kernels.running():
        check_close("output", fused(x), network(x), FLOAT)
        assert kernels.entries == {"norm_pool"}
        with counting_compilations() as (graphs, backend):
            check_close("compiled", torch.compile(fused, fullgraph=True, backend=backend)(x), network(x), FLOAT)
        assert "max_pool" in graphs[0].code
        fused.train()(x)  # as its layers are: nothing of the stem is fused a second time
    symbolic = torch.fx.symbolic_trace(fused.stem)
    check_close("traced", symbolic(x), network.stem(x), FLOAT)


def test_other_pools_of_a_fused_network_stay():
    pools = [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((3, 3), 2, 1)]
    pools[2].register_forward_hook(hook)
    fused = gsanet.fuse_for_inference(nn.Sequential(*pools))
    assert [type(pool) for pool in fused] == [nn.MaxPool2d] * 3 + [InferenceMaxPool2d]


def test_max_pool_has_no_gradient(kernels):
    x = feature_map(kernels, FLOAT, 2, 8, 6, 6).requires_grad_()
    with kernels.running(), pytest.raises(RuntimeError, match="max_pool has no gradient"):
        norm_ops.max_pool(x).sum().backward()


@pytest.mark.parametrize("kernel", ["attention", "convolution"])
def test_compiled_networks_keep_no_map_in_float32(planned, kernel):
    """Half of what is kept for the backward pass would be too much; in 16 bits each map is kept once."""
    kept = []

    def note(graph, _):
        kept.extend(node.meta["val"] for node in graph.graph.find_nodes(op="output")[0].args[0] if "val" in node.meta)
        return graph.forward

    name = {"attention": "gsa_resnet26", "convolution": "conv_resnet26"}[kernel]
    network = gsanet.create_model(name, img_size=64, num_classes=5, depths=(1, 2)).to(memory_format=LAST).train()
    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    images = torch.randn(2, 3, 64, 64).to(memory_format=LAST)
    with torch.autocast("cpu", dtype=BF16):
        torch.compile(network, fullgraph=True, dynamic=False, backend=backend)(images)
    torch._dynamo.reset()
    maps = [value for value in kept if isinstance(value, torch.Tensor) and value.dim() in (4, 5)]
    assert len(maps) > 20
    assert not [value.shape for value in maps if value.dtype is FLOAT]
