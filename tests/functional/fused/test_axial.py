"""The kernels of axial attention against PyTorch's operators in float64: outputs and gradients.

As in `test_kernels`, each test runs the kernels' own source on the host stand-in and, where there is one, on a GPU:

    python -m pytest -k gpu tests/functional/fused/test_axial.py
"""

import copy
import itertools
import random

import pytest
import torch
from functional.fused.graphs import check_replay
from functional.fused.test_instantiations import MACHINES, check_that_they_fit
from functional.fused.test_kernels import BF16, FLOAT, HALF, check_close, normal, same_bits
from torch.utils.flop_counter import FlopCounterMode

from gsanet.functional import use_backend
from gsanet.functional.fused import axial as fused
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.plan import Shape
from gsanet.functional.fused.plan.axial import fits_axial, plan_axial
from gsanet.layers import AxialAttention
from gsanet.layers.axial_attention import axial_attention

NAMES = ("out", "d_q", "d_k", "d_v", "d_rel")
ENTRIES = {"axial_forward", "axial_backward", "table_gradient"}


def inputs(kernels, dtype, size, heads, key, value=None, rows=None, seed=0):
    """Leaves q, k, v and rel, and a gradient of the output."""
    value, rows = value or key, rows or 2 * size[1] - 1
    shapes = [(*size, heads, key), (*size, heads, key), (*size, heads, value), (rows, key), (*size, heads, value)]
    found = [normal(*shape, seed=seed + i).to(dtype).to(kernels.device) for i, shape in enumerate(shapes)]
    return *(one.requires_grad_() for one in found[:4]), found[4]


def run(q, k, v, rel, d_out):
    out = axial_attention(q, k, v, rel)
    return [out, *torch.autograd.grad(out, (q, k, v, rel), d_out)]


def check(kernels, *tensors):
    """The output and all gradients; they are returned."""
    with kernels.running():
        found = run(*tensors)
    assert kernels.entries >= ENTRIES
    exact = [one.detach().double().cpu() for one in tensors]
    with use_backend("reference"):
        expected = run(*(one.requires_grad_() for one in exact))
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        assert mine.dtype == tensors[0].dtype
        check_close(name, mine, theirs, tensors[0].dtype)
    return found


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value"),
    [
        (BF16, (2, 32, 3), 8, 8, 8),
        (BF16, (1, 32, 2), 8, 16, 16),
        (BF16, (2, 16, 5), 8, 16, 16),
        (BF16, (1, 16, 3), 4, 32, 32),
        (BF16, (2, 8, 5), 4, 32, 32),
        (BF16, (1, 8, 8), 2, 64, 64),
        (BF16, (2, 4, 7), 8, 64, 64),
        (BF16, (1, 56, 2), 4, 8, 8),
        (BF16, (1, 28, 3), 2, 16, 16),
        (BF16, (1, 14, 3), 2, 32, 32),
        (BF16, (2, 7, 7), 2, 64, 64),
        (HALF, (1, 32, 3), 2, 8, 8),
        (HALF, (2, 5, 7), 3, 24, 8),
        (FLOAT, (1, 32, 2), 2, 8, 8),
        (FLOAT, (2, 9, 4), 2, 12, 20),
        (FLOAT, (2, 3, 11), 5, 4, 9),
        (FLOAT, (1, 40, 2), 1, 16, 8),
        (BF16, (2, 13, 4), 3, 9, 12),
        (BF16, (1, 1, 19), 2, 8, 8),
        (BF16, (1, 17, 2), 1, 8, 24),
    ],
    ids=str,
)
def test_against_float64(kernels, dtype, size, heads, key, value):
    check(kernels, *inputs(kernels, dtype, size, heads, key, value))


@pytest.mark.parametrize("seed", range(8))
def test_any_shape(kernels, seed):
    choose = random.Random(seed)
    shapes = itertools.product(range(1, 65), (4, 8, 9, 12, 16, 24, 32, 64), (4, 8, 12, 16, 32, 64))
    length, key, value = choose.choice([shape for shape in shapes if fits_axial(*shape)])
    size = choose.randint(1, 3), length, choose.randint(1, 9)
    dtype, heads = choose.choice((BF16, FLOAT, HALF)), choose.choice((1, 2, 3, 4, 8))
    check(kernels, *inputs(kernels, dtype, size, heads, key, value, seed=seed))


@pytest.mark.parametrize("rows", [5, 25])
def test_tables_of_other_lengths(kernels, rows):
    """Zeros around a shorter one, the middle of a longer one."""
    check(kernels, *inputs(kernels, BF16, (1, 8, 3), 2, 8, rows=rows))


def test_runs_are_the_same_in_any_order(kernels):
    tensors = inputs(kernels, BF16, (2, 32, 7), 8, 8)
    first = check(kernels, *tensors)
    for _ in kernels.other_orders():
        assert same_bits(first, check(kernels, *tensors))
    assert same_bits(first, check(kernels, *tensors))


@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_one_projection(kernels, turned):
    """As the module has them, along columns or rows: nothing is copied, and results lie in the order of the map."""
    parts = normal(2, 6, 5, 3 * 32, seed=4).to(BF16).to(kernels.device)
    rel = normal(2 * (5 if turned else 6) - 1, 8, seed=5).to(BF16).to(kernels.device)
    d_out = normal(2, 6, 5, 4, 8, seed=6).to(BF16).to(kernels.device)
    maps = [part.unflatten(-1, (4, 8)) for part in parts.split(32, dim=-1)]
    if turned:
        maps, d_out = [one.transpose(1, 2) for one in maps], d_out.transpose(1, 2)
    found = check(kernels, *(one.requires_grad_() for one in (*maps, rel)), d_out)
    for one in found[:4]:
        assert (one.transpose(1, 2) if turned else one).is_contiguous()
    assert all(constants["VECTOR"] for constants in kernels.constants("axial_backward"))


def check_module(kernels, module, x, entries):
    """The gradient of its input under autocast: on a GPU parameters in float32, on the host all in bfloat16."""
    exact, expected_x = copy.deepcopy(module).double(), x.double().requires_grad_()
    module, x = module.to(kernels.device), x.to(kernels.device)
    if kernels.device == "cpu":
        module, x = module.to(BF16), x.to(BF16)
    x.requires_grad_()
    with kernels.running(), torch.autocast("cuda", BF16, enabled=kernels.device != "cpu"):
        out = module(x)
    (found,) = torch.autograd.grad(out.float().square().sum(), x)
    (expected,) = torch.autograd.grad(exact(expected_x).square().sum(), expected_x)
    assert kernels.entries >= entries
    assert (found.double().cpu() - expected).norm() / expected.norm() < 4e-2


def test_the_module_with_autocast(kernels):
    """Columns, a batch norm, rows."""
    torch.manual_seed(0)
    check_module(kernels, AxialAttention(32, feat_size=(8, 6), num_heads=4), torch.randn(3, 32, 8, 6), ENTRIES)


def test_operators(kernels):
    """Schemas, fake results of the same strides, gradients under torch.compile."""
    q, k, v, rel, d_out = inputs(kernels, FLOAT, (2, 4, 3), 2, 8)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    with kernels.running(poison=False):
        torch.library.opcheck(fused.axial_attention, (q, k, v, rel), test_utils=tests)
        turned = [one.detach().transpose(1, 2) for one in inputs(kernels, FLOAT, (2, 3, 4), 2, 8)[:3]]
        torch.library.opcheck(fused.axial_attention, (*turned, rel.detach()), test_utils=tests)
        plain = [one.detach() for one in (d_out, q, k, v, rel)]
        torch.library.opcheck(fused.axial_attention_gradient, plain, test_utils=tests[:2])


def test_second_derivatives(kernels):
    tensors = inputs(kernels, FLOAT, (1, 4, 3), 2, 8)
    found = []
    for backend in ("fused", "torch"):
        with use_backend(backend):
            out = axial_attention(*tensors[:4])
            first = torch.autograd.grad(out, tensors[:4], tensors[4], create_graph=True)
            found.append(torch.autograd.grad(sum(one.square().sum() for one in first), tensors[:4]))
    assert kernels.entries >= ENTRIES
    for mine, theirs in zip(*found, strict=True):
        check_close("second", mine, theirs, FLOAT)


def test_empty_batches(kernels):
    tensors = inputs(kernels, BF16, (0, 8, 3), 2, 8)
    with kernels.running():
        found = run(*tensors)
    assert not kernels.launched
    assert [one.shape for one in found[1:]] == [one.shape for one in tensors[:4]]
    assert not found[4].any()


def test_what_goes_to_pytorch(kernels, monkeypatch):
    q, k, v, rel, d_out = inputs(kernels, FLOAT, (1, 4, 3), 2, 8)
    long = inputs(kernels, FLOAT, (1, 65, 1), 1, 8)
    with kernels.running():
        run(*long)
        axial_attention(*(one.detach().double() for one in (q, k, v, rel)))
        torch.func.vmap(axial_attention, in_dims=(0, 0, 0, None))(*(one.detach()[None] for one in (q, k, v)), rel)
        torch.func.jvp(lambda q: axial_attention(q, k.detach(), v.detach(), rel.detach()), (q.detach(),), (k.detach(),))
        monkeypatch.setattr(fused, "wanted", False)
        run(q, k, v, rel, d_out)
    with use_backend("torch"):
        run(q, k, v, rel, d_out)
    assert not kernels.launched


def test_operations_are_those_of_the_equation(kernels):
    """Forward and backward, counted as PyTorch counts its products."""
    tensors = inputs(kernels, FLOAT, (2, 8, 3), 2, 8, 16)
    counts = []
    for backend in ("fused", "torch"):
        with use_backend(backend), FlopCounterMode(display=False) as counter:
            run(*tensors)
        counts.append(counter.get_total_flops())
    assert kernels.entries >= ENTRIES
    assert counts[0] == counts[1] == 3 * 2 * 2 * 8 * 3 * 2 * 8 * (8 + 8 + 16)


def test_compiled(kernels):
    tensors = inputs(kernels, BF16, (2, 8, 4), 2, 8)
    torch._dynamo.reset()
    with kernels.running(poison=False):
        backend = "inductor" if kernels.device == "cuda" else "aot_eager"
        compiled = torch.compile(axial_attention, fullgraph=True, backend=backend)
        out = compiled(*tensors[:4])
        found = [out, *torch.autograd.grad(out, tensors[:4], tensors[4])]
        assert kernels.entries >= ENTRIES
        assert same_bits(found, run(*tensors))


def test_cuda_graph(gpu):
    tensors = inputs(gpu, BF16, (4, 16, 16), 8, 16)
    check_replay(gpu, lambda: run(*tensors))


def test_larger_batches(gpu):
    for length, width in ((32, 8), (32, 16), (16, 32), (8, 64), (4, 64), (56, 8), (56, 16), (28, 32)):
        check(gpu, *inputs(gpu, BF16, (16, length, length), 8, width))


@pytest.mark.parametrize(("length", "width", "fits"), [(64, 16, True), (64, 17, False), (65, 8, False), (7, 64, True)])
def test_bounds(length, width, fits):
    assert fits_axial(length, width, width) == fits


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("architecture", MACHINES)
def test_the_kernels_of_the_network_compile(architecture):
    """Of images of 64 and of 224 pixels; of the former with next to no spills."""
    shapes = [(32, 8), (32, 16), (16, 16), (16, 32), (8, 32), (8, 64), (4, 64), (56, 8), (56, 16), (28, 16), (28, 32),
              (14, 32), (14, 64), (7, 64)]  # fmt: skip
    machine = MACHINES[architecture]
    plans = [
        plan_axial(machine, Shape(BF16, 8, width, width, vector=True), length, length, 512, entry)
        for length, width in shapes
        for entry in ("axial_forward", "axial_backward")
    ]
    binaries = compile_all([plan.kernel for plan in plans], architecture, workers=2)
    check_that_they_fit(machine, binaries, plans)
    assert all(binaries[plan.kernel].spill_stores <= 32 for plan in plans[:14])


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_the_kernels_of_other_dtypes_compile(dtype):
    machine = MACHINES["sm_90"]
    plans = [
        plan_axial(machine, Shape(dtype, 8, width, width, vector=True), length, length, 512, entry)
        for length, width in ((32, 8), (16, 16))
        for entry in ("axial_forward", "axial_backward")
    ]
    binaries = compile_all([plan.kernel for plan in plans], "sm_90", workers=2)
    assert all(plan.shared_bytes + binaries[plan.kernel].shared <= machine.shared_memory for plan in plans)
