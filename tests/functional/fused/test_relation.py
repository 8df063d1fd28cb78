"""The kernels of local relation against PyTorch's operators in float64: outputs and gradients.

As in `test_kernels`, each test runs the kernels' own source on the host stand-in and, where there is one, on a GPU:

    python -m pytest -k gpu tests/functional/fused/test_relation.py
"""

import random

import pytest
import torch
from functional.fused.graphs import check_replay
from functional.fused.test_axial import check_module
from functional.fused.test_instantiations import MACHINES, check_that_they_fit
from functional.fused.test_kernels import BF16, FLOAT, HALF, check_close, normal, same_bits
from torch.utils.flop_counter import FlopCounterMode

from gsanet.functional import use_backend
from gsanet.functional.fused import relation as fused
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.plan import Shape
from gsanet.functional.fused.plan.relation import plan_relation
from gsanet.layers import LocalRelation
from gsanet.layers.local_relation import local_relation

NAMES = ("out", "d_q", "d_k", "d_prior", "d_v")
ENTRIES = {"relation_forward", "relation_queries", "relation_neighbours", "table_gradient"}


def inputs(kernels, dtype, size, heads=3, channels=8, window=7, stride=1, seed=0):
    """Leaves q, k, prior and v, a gradient of the output, and the options."""
    batch, height, width = size
    inner = batch, -(-height // stride), -(-width // stride)
    shapes = [(*inner, heads), (*size, heads), (heads, window**2), (*size, heads, channels), (*inner, heads, channels)]
    found = [normal(*shape, seed=seed + i).float().to(kernels.device) for i, shape in enumerate(shapes)]
    found[3:] = [one.to(dtype) for one in found[3:]]
    return [one.requires_grad_() for one in found[:4]], found[4], (window, stride)


def run(tensors, d_out, options):
    out = local_relation(*tensors, *options)
    return [out, *torch.autograd.grad(out, tensors, d_out)]


def check(kernels, tensors, d_out, options):
    """The output and all gradients; they are returned."""
    with kernels.running():
        found = run(tensors, d_out, options)
    assert kernels.entries >= ENTRIES
    exact = [one.detach().double().cpu().requires_grad_() for one in tensors]
    with use_backend("reference"):
        expected = run(exact, d_out.double().cpu(), options)
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        narrow = name in ("out", "d_v")
        assert mine.dtype == (d_out.dtype if narrow else FLOAT)
        check_close(name, mine, theirs, d_out.dtype)
    return found


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "channels", "window", "stride"),
    [
        (BF16, (2, 9, 11), 13, 8, 7, 1),
        (BF16, (1, 8, 8), 25, 8, 7, 2),
        (BF16, (1, 4, 4), 100, 8, 7, 1),
        (BF16, (1, 3, 2), 130, 8, 3, 1),
        (HALF, (2, 5, 7), 5, 8, 5, 2),
        (HALF, (1, 6, 4), 2, 16, 3, 3),
        (FLOAT, (2, 7, 8), 13, 8, 7, 1),
        (FLOAT, (1, 7, 9), 4, 8, 7, 2),
        (FLOAT, (1, 1, 1), 2, 4, 7, 1),
        (FLOAT, (2, 1, 12), 3, 5, 5, 1),
        (BF16, (2, 12, 1), 3, 3, 3, 2),
        (BF16, (1, 5, 5), 137, 1, 1, 1),
    ],
    ids=str,
)
def test_against_float64(kernels, dtype, size, heads, channels, window, stride):
    check(kernels, *inputs(kernels, dtype, size, heads, channels, window, stride))


@pytest.mark.parametrize("seed", range(8))
def test_any_shape(kernels, seed):
    choose = random.Random(seed)
    size = choose.randint(1, 3), choose.randint(1, 12), choose.randint(1, 12)
    dtype, heads, channels = choose.choice((BF16, FLOAT, HALF)), choose.randint(1, 40), choose.randint(1, 16)
    window, stride = choose.choice((1, 3, 5, 7)), choose.randint(1, 3)
    check(kernels, *inputs(kernels, dtype, size, heads, channels, window, stride, seed))


def test_more_pixels_than_blocks(kernels):
    """A thread has several, of several images."""
    check(kernels, *inputs(kernels, BF16, (5, 16, 16), heads=6))


def test_runs_are_the_same_in_any_order(kernels):
    tensors = inputs(kernels, BF16, (2, 9, 8), heads=13)
    first = check(kernels, *tensors)
    for _ in kernels.other_orders():
        assert same_bits(first, check(kernels, *tensors))
    assert same_bits(first, check(kernels, *tensors))


@pytest.mark.parametrize(("query", "key"), [(12, 0), (40, 0), (1024, 1024)])
def test_far_from_zero(kernels, query, key):
    """Queries far from all keys, or both from zero: as near to float64 as PyTorch's operators in float32."""
    (q, k, prior, v), d_out, options = inputs(kernels, FLOAT, (1, 6, 5))
    tensors = [(q + query).detach().requires_grad_(), (k + key).detach().requires_grad_(), prior, v]
    with kernels.running():
        found = run(tensors, d_out, options)
    assert kernels.entries >= ENTRIES
    with use_backend("torch"):
        usual = run(tensors, d_out, options)
        exact = run([one.detach().double().requires_grad_() for one in tensors], d_out.double(), options)
    for name, *results, expected in zip(NAMES, found, usual, exact, strict=True):
        mine, theirs = ((one - expected).norm() / expected.norm() for one in results)
        assert mine < theirs + 2e-5, (name, mine, theirs)


def test_what_is_not_a_number_stays_with_its_windows(kernels):
    tensors, d_out, options = inputs(kernels, BF16, (1, 12, 12), heads=2)
    with torch.no_grad():
        tensors[3][0, 0, 0, 1] = torch.nan
    with kernels.running():
        found = run(tensors, d_out, options)
    for name, one in zip(NAMES, found, strict=True):
        if name not in ("d_prior", "d_v"):
            assert one[0, :4, :4, 1].isnan().all() or name == "d_k"
        if name != "d_prior":
            assert one[0, :, :, 0].isfinite().all(), name
            assert one[0, 7:, 7:].isfinite().all(), name


def test_a_prior_that_shuts_rows_out(kernels):
    """The first rows of the window have no weight: the largest score of nothing is not infinite."""
    (q, k, prior, v), d_out, options = inputs(kernels, FLOAT, (1, 9, 8))
    with torch.no_grad():
        prior[:, : 2 * 7] = -torch.inf
    with kernels.running():
        found = run([q, k, prior, v], d_out, options)
    with use_backend("torch"):
        expected = run([q, k, prior, v], d_out, options)
    assert kernels.entries >= ENTRIES
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        assert mine.isfinite().all(), name
        check_close(name, mine, theirs, FLOAT)


def test_the_module_with_autocast(kernels):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 7, 9).to(memory_format=torch.channels_last)
    check_module(kernels, LocalRelation(16, 24, stride=2), x, ENTRIES)


def test_maps_that_are_not_dense(kernels):
    (q, k, prior, v), d_out, options = inputs(kernels, BF16, (2, 6, 5), heads=4)
    turned = [one.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in (q, k, v)]
    d_out = d_out.transpose(3, 4).contiguous().transpose(3, 4)
    check(kernels, [turned[0], turned[1], prior, turned[2]], d_out, options)


def test_operators(kernels):
    """Schemas, fake results of the same strides, gradients under torch.compile."""
    tensors, d_out, options = inputs(kernels, FLOAT, (2, 4, 3), 2, 8, 3, 2)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    with kernels.running(poison=False):
        torch.library.opcheck(fused.local_relation, (*tensors, *options), test_utils=tests)
        plain = [one.detach() for one in (d_out, *tensors)]
        torch.library.opcheck(fused.local_relation_gradient, (*plain, *options), test_utils=tests[:2])


def test_second_derivatives(kernels):
    tensors, d_out, options = inputs(kernels, FLOAT, (1, 4, 3), 2, 4, 3)
    found = []
    for backend in ("fused", "torch"):
        with use_backend(backend):
            out = local_relation(*tensors, *options)
            first = torch.autograd.grad(out, tensors, d_out, create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in first), tensors))
    assert kernels.entries >= ENTRIES
    for mine, theirs in zip(*found, strict=True):
        check_close("second", mine, theirs, FLOAT)


def test_empty_batches(kernels):
    tensors, d_out, options = inputs(kernels, BF16, (0, 4, 3))
    with kernels.running():
        found = run(tensors, d_out, options)
    assert not kernels.launched
    assert [one.shape for one in found[1:]] == [one.shape for one in tensors]
    assert not found[3].any()


def test_what_goes_to_pytorch(kernels, monkeypatch):
    tensors, d_out, options = inputs(kernels, FLOAT, (1, 4, 3), 2)
    plain = [one.detach() for one in tensors]
    with kernels.running():
        run(*inputs(kernels, FLOAT, (1, 4, 3), 2, window=9))
        run(*inputs(kernels, FLOAT, (1, 4, 3), 2, channels=17))
        local_relation(*(one.double() for one in plain), *options)
        torch.func.vmap(lambda v: local_relation(*plain[:3], v, *options))(plain[3][None])
        torch.func.jvp(lambda v: local_relation(*plain[:3], v, *options), (plain[3],), (plain[3],))
        monkeypatch.setattr(fused, "wanted", False)
        run(tensors, d_out, options)
    with use_backend("torch"):
        run(tensors, d_out, options)
    assert not kernels.entries & ENTRIES


def test_operations_are_those_of_the_equation(kernels):
    """Forward and backward, counted as those of the products."""
    tensors, d_out, options = inputs(kernels, FLOAT, (2, 4, 3), 2, 8, 3)
    counts = []
    for backend in ("fused", "torch"):
        with use_backend(backend), FlopCounterMode(display=False) as counter:
            run(tensors, d_out, options)
        counts.append(counter.get_total_flops())
    assert kernels.entries >= ENTRIES
    assert counts[0] == counts[1] == 3 * 2 * (2 * 4 * 3 * 2) * 9 * (2 + 8)


def test_compiled(kernels):
    tensors, d_out, options = inputs(kernels, BF16, (2, 8, 4), 2)
    torch._dynamo.reset()
    with kernels.running(poison=False):
        backend = "inductor" if kernels.device == "cuda" else "aot_eager"
        compiled = torch.compile(local_relation, fullgraph=True, backend=backend)
        out = compiled(*tensors, *options)
        found = [out, *torch.autograd.grad(out, tensors, d_out)]
        assert kernels.entries >= ENTRIES
        assert same_bits(found, run(tensors, d_out, options))


def test_cuda_graph(gpu):
    tensors, d_out, options = inputs(gpu, BF16, (4, 16, 16), 13)
    check_replay(gpu, lambda: run(tensors, d_out, options))


def test_larger_batches(gpu):
    shapes = ((32, 13, 1), (32, 25, 2), (16, 25, 1), (16, 50, 2), (8, 50, 1), (8, 100, 2), (4, 100, 1))
    for side, heads, stride in shapes:
        check(gpu, *inputs(gpu, BF16, (16, side, side), heads, stride=stride))


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize(
    ("architecture", "dtype"), [*((name, BF16) for name in MACHINES), ("sm_90", HALF), ("sm_90", FLOAT)]
)
def test_the_kernels_of_the_network_compile(architecture, dtype):
    """Next to nothing is spilled."""
    machine = MACHINES[architecture]
    plans = [
        plan_relation(machine, entry, Shape(dtype, heads, 8, 8, vector=True), 2**19, 7, stride)
        for heads, stride in ((13, 1), (25, 2), (50, 1), (100, 2))
        for entry in sorted(ENTRIES - {"table_gradient"})
    ]
    binaries = compile_all([plan.kernel for plan in plans], architecture, workers=2)
    check_that_they_fit(machine, binaries, plans)
