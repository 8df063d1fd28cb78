"""The kernels of position-sensitive attention against PyTorch's operators in float64: outputs and gradients.

As in `test_kernels`, each test runs the kernels' own source on the host stand-in and, where there is one, on a GPU:

    python -m pytest -k gpu tests/functional/fused/test_position_sensitive.py
"""

import copy
import itertools
import random

import pytest
import torch
from functional.fused.graphs import check_replay
from functional.fused.test_axial import check_module
from functional.fused.test_instantiations import MACHINES, check_that_they_fit
from functional.fused.test_kernels import BF16, FLOAT, HALF, check_close, normal, same_bits
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gsanet.functional import use_backend
from gsanet.functional.fused import position_sensitive as fused
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.plan.position_sensitive import fits_position_sensitive, plan_position_sensitive
from gsanet.functional.position_sensitive import attend_by_products, sum_scores
from gsanet.layers import PositionSensitiveAttention

NAMES = ("out", "d_projected", "d_tables", "d_content")
ENTRIES = {"position_sensitive_forward", "position_sensitive_backward", "table_gradient"}
SUMS = {"position_sensitive_sums", "position_sensitive_sums_gradient", "table_gradient"}


def inputs(kernels, dtype, size, heads, key, seed=0):
    """Leaves: the map, tables and factors; and a gradient of the output."""
    shapes = [(*size, heads, 4 * key), (heads, 2 * size[1] - 1, 4 * key), (heads,), (*size, 2, heads, 2 * key)]
    found = [normal(*shape, seed=seed + i).to(kernels.device) for i, shape in enumerate(shapes)]
    # Scores of a few units: of many, a softmax makes large errors of small ones.
    found[1] = found[1] * key**-0.5
    projected, tables, d_out = (found[i].to(dtype) for i in (0, 1, 3))
    content = (found[2] * key**-0.5).float()
    return *(one.requires_grad_() for one in (projected, tables, content)), d_out


def run(projected, tables, content, d_out, operator=fused.position_sensitive_attention):
    out = operator(projected, tables, content)
    return [out, *torch.autograd.grad(out, (projected, tables, content), d_out)]


def check(kernels, *tensors):
    """The output and all gradients; they are returned."""
    with kernels.running():
        found = run(*tensors)
    assert kernels.entries >= ENTRIES
    exact = [one.detach().double().cpu() for one in tensors]
    expected = run(*(one.requires_grad_() for one in exact[:3]), exact[3], operator=attend_by_products)
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        assert mine.dtype == (FLOAT if name == "d_content" else tensors[0].dtype)
        check_close(name, mine, theirs, tensors[0].dtype)
    return found


def run_sums(projected, table, d_sums, operator=fused.position_sensitive_sums):
    """The sums, and the gradients of q and k; v has none."""
    sums = operator(projected, table)
    d_projected, d_table = torch.autograd.grad(sums, (projected, table), d_sums)
    width = projected.shape[-1] // 2
    assert not d_projected[..., width:].any()
    assert not d_table[..., width:].any()
    return [sums, d_projected[..., :width], d_table[..., :width]]


def check_sums(kernels, projected, tables, d_sums):
    """With the first head's table for all."""
    tensors = projected, tables[0].detach().requires_grad_(), d_sums
    with kernels.running():
        found = run_sums(*tensors)
    assert kernels.entries >= SUMS
    exact = [one.detach().double().cpu() for one in tensors]
    expected = run_sums(*(one.requires_grad_() for one in exact[:2]), exact[2], operator=sum_scores)
    largest = expected[0][1:].expand(2, -1, -1).sqrt() * projected[..., 0, 0].numel() ** 0.5
    errors = (found[0].double().cpu() - expected[0]).abs() / largest.maximum(expected[0].abs())
    assert errors.max() < 1e-4  # sums may be next to nothing, of large numbers
    for name, mine, theirs in zip(("d_projected", "d_table"), found[1:], expected[1:], strict=True):
        check_close(name, mine, theirs, projected.dtype)
    return found


def d_sums_of(kernels, heads, seed=9):
    """A gradient of the sums, about as small as those of a mean over many."""
    return normal(2, 3, heads, seed=seed).float().to(kernels.device) * 1e-6


CASES = pytest.mark.parametrize(
    ("dtype", "size", "heads", "key"),
    [
        (BF16, (2, 32, 3), 8, 4),
        (BF16, (1, 32, 2), 8, 8),
        (BF16, (2, 16, 5), 8, 8),
        (BF16, (1, 16, 3), 4, 16),
        (BF16, (2, 8, 5), 4, 16),
        (BF16, (1, 8, 8), 2, 32),
        (BF16, (2, 4, 7), 8, 32),
        (BF16, (1, 56, 2), 2, 4),
        (BF16, (1, 28, 3), 2, 16),
        (BF16, (2, 7, 7), 2, 32),
        (HALF, (1, 32, 3), 2, 4),
        (HALF, (2, 5, 7), 3, 12),
        (FLOAT, (1, 32, 2), 2, 4),
        (FLOAT, (2, 9, 4), 2, 12),
        (FLOAT, (2, 3, 11), 5, 8),
        (BF16, (1, 1, 19), 2, 8),
        (BF16, (1, 17, 2), 1, 4),
    ],
    ids=str,
)


@CASES
def test_against_float64(kernels, dtype, size, heads, key):
    check(kernels, *inputs(kernels, dtype, size, heads, key))


@CASES
def test_sums_against_float64(kernels, dtype, size, heads, key):
    """In float16 gradients are scaled, as by a GradScaler."""
    projected, tables, *_ = inputs(kernels, dtype, size, heads, key)
    check_sums(kernels, projected, tables, d_sums_of(kernels, heads) * (1e3 if dtype == HALF else 1))


@pytest.mark.parametrize("seed", range(6))
def test_any_shape(kernels, seed):
    choose = random.Random(seed)
    shapes = itertools.product(range(1, 65), range(4, 33, 4))
    length, key = choose.choice([shape for shape in shapes if fits_position_sensitive(*shape)])
    size = choose.randint(1, 3), length, choose.randint(1, 9)
    dtype, heads = choose.choice((BF16, FLOAT, HALF)), choose.choice((1, 2, 3, 4, 8))
    tensors = inputs(kernels, dtype, size, heads, key, seed=seed)
    check(kernels, *tensors)
    check_sums(kernels, *tensors[:2], d_sums_of(kernels, heads) * 1e3)


@pytest.mark.parametrize("key", [4, 8])
def test_runs_are_the_same_in_any_order(kernels, key):
    tensors = inputs(kernels, BF16, (2, 16, 7), 4, key)

    def both():
        return [*check(kernels, *tensors), *check_sums(kernels, *tensors[:2], d_sums_of(kernels, 4))]

    first = both()
    for _ in kernels.other_orders():
        assert same_bits(first, both())
    assert same_bits(first, both())


@pytest.mark.parametrize("turned", [False, True])
def test_a_map_of_a_convolution(kernels, turned):
    """As the layer has it, along columns or rows: nothing is copied, and results lie in the order of the map."""
    pixels = normal(2, 6, 5, 2, 32, seed=4).to(BF16).to(kernels.device)
    tables = normal(2, 2 * (5 if turned else 6) - 1, 32, seed=5).to(BF16).to(kernels.device)
    d_out = normal(2, 6, 5, 2, 2, 16, seed=6).to(BF16).to(kernels.device)
    if turned:
        pixels, d_out = pixels.transpose(1, 2), d_out.transpose(1, 2)
    content = torch.rand(2, device=kernels.device)
    found = check(kernels, pixels.requires_grad_(), tables.requires_grad_(), content.requires_grad_(), d_out)
    for one in found[:2]:
        assert (one.transpose(1, 2) if turned else one).is_contiguous()


def test_any_strides(kernels):
    """What cannot be moved 16 bytes at a time is copied first."""
    projected, tables, content, d_out = inputs(kernels, BF16, (2, 6, 5), 2, 4)
    wide = torch.cat((projected.detach()[..., :3], projected.detach()), dim=-1)[..., 3:].requires_grad_()
    assert not wide.is_contiguous()
    by_head = d_out.movedim(4, 1).contiguous().movedim(1, 4)
    with kernels.running():
        found = run(wide, tables, content, by_head)
        assert same_bits(found, run(projected, tables, content, d_out))
        summed = run(projected, tables, content, d_out[:1, :1, :1, :1, :1, :1].expand(d_out.shape))
        again = run(projected, tables, content, summed[0].new_full(d_out.shape, d_out.flatten()[0].item()))
    assert same_bits(summed, again)


def make(kernels, size=(8, 6), dtype=FLOAT, **options):
    """A layer that is not as it was made, and the same in float64."""
    torch.manual_seed(0)
    module = PositionSensitiveAttention(16, feat_size=size, num_heads=2, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(kernels.device, dtype), copy.deepcopy(module).double()


@pytest.mark.parametrize("training", [True, False])
def test_the_layer_does_without_scores(kernels, training):
    """Against the layer as it makes all scores: output, gradients, and what norms keep.

    Some gradients of norms are zero, or small sums of large numbers.
    """
    module, exact = make(kernels)
    x = normal(3, 16, 8, 6, seed=1)
    for one in (module, exact):
        one.train(training)
    found = []
    for one, own in ((module, x.float().to(kernels.device)), (exact, x.double())):
        own.requires_grad_()
        with kernels.running() if one is module else use_backend("reference"):
            out = one(own)
            (out * torch.linspace(0.5, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
        gradients = {name: parameter.grad for name, parameter in one.named_parameters()}
        found.append({"out": out, "x": own.grad, **gradients, **dict(one.named_buffers())})
    assert kernels.entries >= (ENTRIES | SUMS if training else ENTRIES)
    for name, theirs in found[1].items():
        mine = found[0][name]
        if name.endswith("norm_scores.bias"):
            assert not mine.any()
            assert theirs.abs().max() < 1e-10
        elif name.endswith("num_batches_tracked"):
            assert mine.item() == theirs.item() == training
        else:
            assert (mine.double().cpu() - theirs).norm() / theirs.norm().clamp_min(0.1) < 2e-3, name


@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_other_norms_of_scores(kernels, options):
    module, exact = make(kernels)
    x = normal(2, 16, 8, 6, seed=1)
    for one in (module, exact):
        parameter = next(one.parameters())
        for line in (one.column, one.row):
            line.norm_scores = nn.BatchNorm2d(6, device=parameter.device, dtype=parameter.dtype, **options)
    with kernels.running():
        out = module(x.float().to(kernels.device))
    assert kernels.entries >= {"position_sensitive_forward", "position_sensitive_sums"}
    expected = exact(x.double())
    assert (out.double().cpu() - expected).norm() / expected.norm() < 1e-4
    for mine, theirs in zip(module.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double().cpu(), theirs.double(), rtol=1e-4, atol=1e-5)


def test_the_layer_with_autocast(kernels):
    torch.manual_seed(0)
    module = PositionSensitiveAttention(32, feat_size=(8, 6), num_heads=2)
    check_module(kernels, module, torch.randn(3, 32, 8, 6), ENTRIES | SUMS)


def test_where_the_layer_makes_scores(kernels):
    """A norm that is watched, or another one, or one pixel, which has no variance, keeps its place."""
    module, _ = make(kernels)
    x = normal(2, 16, 8, 6).float().to(kernels.device)
    seen = []
    with kernels.running():
        hook = module.row.norm_scores.register_forward_hook(lambda *arguments: seen.append(1))
        module.column.norm_scores = nn.Identity()
        module(x)
        assert seen
        assert not kernels.launched
        hook.remove()
        module(x)
        assert len(kernels.launched) >= 1
        with pytest.raises(ValueError, match="more than 1 value"):
            make(kernels, size=(1, 1))[0](x[:1, :, :1, :1])


def test_operators(kernels):
    """Schemas, fake results of the same strides, gradients under torch.compile."""
    *leaves, d_out = inputs(kernels, FLOAT, (2, 4, 3), 2, 4)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    plain = [one.detach() for one in leaves]
    with kernels.running(poison=False):
        torch.library.opcheck(fused.position_sensitive_attention, leaves, test_utils=tests)
        turned = inputs(kernels, FLOAT, (2, 3, 4), 2, 4)[0].detach().transpose(1, 2)
        torch.library.opcheck(fused.position_sensitive_attention, (turned, *plain[1:]), test_utils=tests)
        torch.library.opcheck(fused.position_sensitive_gradient, (d_out, *plain), test_utils=tests[:2])
        table = plain[1][0].clone().requires_grad_()
        torch.library.opcheck(fused.position_sensitive_sums, (leaves[0], table), test_utils=tests)
        for projected in (plain[0], turned):
            one = d_sums_of(kernels, 2), projected, table.detach()[: 2 * projected.shape[1] - 1]
            torch.library.opcheck(fused.position_sensitive_sums_gradient, one, test_utils=tests[:2])


def test_second_derivatives(kernels):
    *leaves, d_out = inputs(kernels, FLOAT, (1, 4, 3), 2, 4)
    found = []
    with kernels.running():
        for operator in (fused.position_sensitive_attention, attend_by_products):
            first = torch.autograd.grad(operator(*leaves), leaves, d_out, create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
            sums = fused.position_sensitive_sums if operator is not attend_by_products else sum_scores
            map_and_table = leaves[0], leaves[1][0].detach().requires_grad_()
            first = torch.autograd.grad(sums(*map_and_table).square().sum(), map_and_table, create_graph=True)
            found[-1] += torch.autograd.grad(sum(one.square().sum() for one in first), map_and_table)
    assert kernels.entries >= ENTRIES | SUMS
    for mine, theirs in zip(*found, strict=True):
        check_close("second", mine, theirs, FLOAT)


def test_empty_batches(kernels):
    *leaves, d_out = inputs(kernels, BF16, (0, 8, 3), 2, 4)
    with kernels.running():
        found = run(*leaves, d_out)
        assert not any(one.any() for one in run_sums(leaves[0], leaves[1][0], d_sums_of(kernels, 2)))
    assert not kernels.launched
    assert [one.shape for one in found[1:]] == [one.shape for one in leaves]
    assert not any(one.any() for one in found)


def test_what_goes_to_pytorch(kernels, monkeypatch):
    taken = inputs(kernels, FLOAT, (1, 4, 3), 2, 4)[0], torch.zeros(7, 16, device=kernels.device)
    with kernels.running():
        assert fused.takes(*taken)
        for size, key in (((1, 65, 1), 4), ((1, 4, 3), 6), ((1, 64, 1), 12)):
            projected = torch.zeros(*size, 1, 4 * key, device=kernels.device)
            assert not fused.takes(projected, torch.zeros(2 * size[1] - 1, 4 * key, device=kernels.device))
        assert not fused.takes(taken[0].double(), taken[1])
        assert not fused.takes(taken[0], taken[1][1:])
        monkeypatch.setattr(fused, "wanted", False)
        assert not fused.takes(*taken)
        monkeypatch.setattr(fused, "wanted", True)
    with use_backend("torch"):
        assert not fused.takes(*taken)


def test_operations_are_those_of_the_equation(kernels):
    """Forward and backward, counted as PyTorch counts its products."""
    tensors = inputs(kernels, FLOAT, (2, 8, 3), 2, 4)
    counts = []
    with kernels.running():
        for operator in (fused.position_sensitive_attention, attend_by_products):
            with FlopCounterMode(display=False) as counter:
                run(*tensors, operator=operator)
            counts.append(counter.get_total_flops())
        for operator in (fused.position_sensitive_sums, sum_scores):
            with FlopCounterMode(display=False) as counter:
                operator(tensors[0], tensors[1][0]).sum().backward()
            counts.append(counter.get_total_flops())
    assert kernels.entries >= ENTRIES | SUMS
    assert counts[0] == counts[1] == 3 * 2 * 2 * 8 * 3 * 2 * 8 * (3 * 4 + 2 * 8)
    assert counts[2] == counts[3] == 3 * 2 * 2 * 8 * 3 * 2 * 8 * 3 * 4


def test_compiled(kernels):
    """The whole layer, whose norms' statistics are kept in the graph."""
    module, _ = make(kernels)
    x = normal(2, 16, 8, 6).float().to(kernels.device)
    torch._dynamo.reset()
    with kernels.running(poison=False):
        expected = copy.deepcopy(module)(x)
        backend = "inductor" if kernels.device == "cuda" else "aot_eager"
        out = torch.compile(module, fullgraph=True, backend=backend)(x)
        out.sum().backward()
    assert kernels.entries >= ENTRIES | SUMS
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    assert module.column.norm_scores.num_batches_tracked == 1


def test_cuda_graph(gpu):
    tensors = inputs(gpu, BF16, (4, 16, 16), 8, 8)
    check_replay(gpu, lambda: run(*tensors))


def test_larger_batches(gpu):
    for length, key in SHAPES:
        tensors = inputs(gpu, BF16, (16, length, length), 8, key)
        check(gpu, *tensors)
        check_sums(gpu, *tensors[:2], d_sums_of(gpu, 8))


# Lines and heads of the network, for images of 64 pixels and of 224.
SHAPES = [(32, 4), (32, 8), (16, 8), (16, 16), (8, 16), (8, 32), (4, 32)]
LARGER = [(56, 4), (56, 8), (28, 8), (28, 16), (14, 16), (14, 32), (7, 32)]


@pytest.mark.parametrize(
    ("length", "key", "fits"), [(64, 8, True), (64, 12, False), (65, 4, False), (7, 32, True), (7, 6, False)]
)
def test_bounds(length, key, fits):
    assert fits_position_sensitive(length, key) == fits


def plans(machine, dtype, shapes):
    return [
        plan_position_sensitive(machine, dtype, 8, key, length, length, 512, entry)
        for length, key in shapes
        for entry in sorted((ENTRIES | SUMS) - {"table_gradient"})
    ]


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("architecture", MACHINES)
def test_the_kernels_of_the_network_compile(architecture):
    """For images of 64 pixels without spills."""
    machine = MACHINES[architecture]
    small, large = plans(machine, BF16, SHAPES), plans(machine, BF16, LARGER)
    binaries = compile_all([plan.kernel for plan in (*small, *large)], architecture, workers=2)
    check_that_they_fit(machine, binaries, (*small, *large))
    assert all(binaries[plan.kernel].spill_stores <= 16 for plan in small)


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_the_kernels_of_other_dtypes_compile(dtype):
    machine = MACHINES["sm_90"]
    planned = plans(machine, dtype, [(32, 4), (16, 8)])
    binaries = compile_all([plan.kernel for plan in planned], "sm_90", workers=2)
    assert all(plan.shared_bytes + binaries[plan.kernel].shared <= machine.shared_memory for plan in planned)
