"""Gradients of lines whose scores stay in registers, `kernels/line_backward_registers.cu`.

The plan does not choose them by itself: here it is told to.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from functional.fused.test_instantiations import MACHINES, check_that_they_fit
from functional.fused.test_kernels import BF16, HALF, check_close, check_module, make_module, normal, same_bits, step

from gsanet.functional import positional_attention, use_backend
from gsanet.functional.fused import calls
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.plan import Machine, Shape, plan_line
from gsanet.functional.fused.plan import lines as line_plans

ENTRY = "line_backward_registers"


@pytest.fixture
def in_registers(monkeypatch):
    """Have all gradients take this way, where they can, with so many pairs, warps and blocks."""

    def choose(pairs=8, warps=4, blocks=1):
        line_plans.plan_line.cache_clear()
        cut = (pairs, warps, blocks)
        monkeypatch.setattr(line_plans, "_in_registers", lambda shape, length, backward, _: cut if backward else None)

    choose()
    yield choose
    line_plans.plan_line.cache_clear()


def gradients(kernels, q, v, rel, d_out, axis, **options):
    """dQ, dV and dR, as the call gives them."""
    d_queries, d_values = torch.empty_like(q), torch.empty_like(v)
    with kernels.running():
        found = calls.attend_gradient(q, v, rel, d_out, axis, d_queries, d_values, **options)
    return d_queries, d_values, found.d_rel


def exact_gradients(q, v, rel, d_out, axis):
    leaves = [one.double().requires_grad_() for one in (q, v, rel)]
    with use_backend("reference"):
        return torch.autograd.grad(positional_attention(*leaves, axis), leaves, d_out.double())


def maps(kernels, dtype, size, heads, key, value, axis):
    """q, v, the table and the gradient of the output."""
    length = size[1] if axis == "column" else size[2]
    shapes = (*size, heads, key), (*size, heads, value), (2 * length - 1, key), (*size, heads, value)
    return [normal(*shape, dtype=dtype, seed=seed).to(kernels.device) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value", "axis", "cut"),
    [
        (BF16, (2, 9, 3), 8, 8, 8, "column", (8, 4, 1)),
        (HALF, (1, 3, 14), 4, 32, 32, "row", (8, 4, 2)),
        (BF16, (1, 16, 3), 8, 16, 16, "column", (16, 8, 1)),
        (BF16, (3, 2, 20), 3, 12, 20, "row", (16, 4, 1)),  # padded heads, places of a block that are left empty
        (HALF, (1, 28, 3), 2, 16, 8, "column", (8, 8, 1)),
        (BF16, (1, 2, 32), 4, 8, 32, "row", (8, 4, 1)),
        (BF16, (1, 3, 40), 1, 5, 9, "row", (8, 4, 1)),
        (BF16, (1, 56, 2), 8, 8, 8, "column", (16, 8, 2)),
        (HALF, (1, 2, 64), 2, 16, 16, "row", (8, 4, 1)),
    ],
    ids=str,
)
def test_gradients(kernels, in_registers, dtype, size, heads, key, value, axis, cut):
    in_registers(*cut)
    arguments = maps(kernels, dtype, size, heads, key, value, axis)
    found = gradients(kernels, *arguments, axis)
    assert kernels.entries == {ENTRY, "table_gradient"} or kernels.entries == {ENTRY}
    for name, one, other in zip(("dQ", "dV", "dR"), found, exact_gradients(*arguments, axis), strict=True):
        check_close(name, one, other, dtype)
    assert same_bits(gradients(kernels, *arguments, axis), found)
    for _ in kernels.other_orders():
        assert same_bits(gradients(kernels, *arguments, axis), found), f"{kernels.order} order differs"


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        (BF16, 2, 64, (14, 9), {}),
        (HALF, 1, 128, (20, 16), {"num_heads": 4, "content": False}),
        (BF16, 3, 24, (10, 11), {"num_heads": 2, "dim_key": 24, "dim_out": 40}),  # padded heads
        (BF16, 1, 32, (4, 28), {"num_heads": 4, "row": True, "column": False}),  # one axis has both parts of content
        (BF16, 1, 40, (9, 12), {"num_heads": 4}),  # heads of 10 channels
    ],
    ids=str,
)
def test_module_in_training(kernels, in_registers, dtype, batch, dim, size, options):
    in_registers(8, 4, 1)
    check_module(kernels, make_module(dtype, dim, size, **options).train(), dtype, batch, size)
    assert ENTRY in kernels.entries
    features = {name for constants in kernels.constants(ENTRY) for name, value in constants.items() if value == 1}
    if not options:
        wanted = {"NORM_VALUES", "NORM_GRADIENT", "CONTENT_QUERIES", "CONTENT_KEYS", "ACCUMULATE", "STATISTICS"}
        assert wanted <= features


@pytest.mark.parametrize(("bad", "dim_key", "dim_out"), [(float("nan"), 16, 16), (float("inf"), 24, 40)])
def test_a_bad_image_stays_alone(kernels, in_registers, bad, dim_key, dim_out):
    """With padded heads and others; in a block there are several images at a time, and others come after them."""
    in_registers(8, 4, 1)
    module = make_module(BF16, 24, (2, 11), num_heads=2, dim_key=dim_key, dim_out=dim_out, column=False)
    module.to(kernels.device)
    kernels.machine = Machine(1, 227 * 1024, 228 * 1024)  # of the host: all lines in one block
    x = normal(9, 24, 2, 11, dtype=BF16).to(kernels.device, memory_format=torch.channels_last)
    d_out = normal(9, dim_out, 2, 11, dtype=BF16, seed=1).to(kernels.device)
    worse, good = x.clone(), [1, 2, 4, 5, 7, 8]
    worse[::3] = bad
    with kernels.running():
        expected, found = (step(module, one, d_out) for one in (x, worse))
    assert ENTRY in kernels.entries
    for name in ("output", "gradient of x"):
        assert torch.equal(found[name][good], expected[name][good]), name
        assert not found[name][::3].isfinite().any()


def test_a_bad_gradient_stays_alone(kernels, in_registers):
    in_registers(16, 4, 1)
    kernels.machine = Machine(1, 227 * 1024, 228 * 1024)
    q, v, rel, d_out = maps(kernels, BF16, (3, 2, 20), 2, 12, 8, "row")
    expected = gradients(kernels, q, v, rel, d_out, "row")
    d_out[1] = float("nan")
    found = gradients(kernels, q, v, rel, d_out, "row")
    assert same_bits([one[[0, 2]] for one in found[:2]], [one[[0, 2]] for one in expected[:2]])
    assert all(one[1].isnan().all() for one in found[:2])


# As `benchmarks/plans.py` has them: what the kernels of a module with both axes do, and that of one with rows only.
NOTHING = dict.fromkeys(
    ("norm_values", "norm_gradient", "pool", "content_queries", "content_keys", "accumulate", "statistics"), False
)
ROW = NOTHING | dict.fromkeys(("norm_values", "content_queries", "statistics"), True)
COLUMN = NOTHING | dict.fromkeys(("norm_gradient", "content_keys", "accumulate"), True)
LINE = NOTHING | dict.fromkeys(("content_queries", "content_keys"), True)
NARROW, WIDE = [(8, 2), (4, 4), (4, 3), (8, 1)], [(8, 1)]  # warps and blocks
COMPILED = [
    *((length, width, features, NARROW) for length, width in ((56, 8), (28, 16), (14, 32), (32, 8), (16, 16))
      for features in (ROW, COLUMN)),
    *((length, width, COLUMN, WIDE) for length, width in ((56, 16), (28, 32))),
]  # fmt: skip
MOST_SPILLED = 450  # bytes of a thread, with some room for another compiler


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("architecture", MACHINES)
def test_they_compile_and_fit(monkeypatch, in_registers, architecture):
    monkeypatch.setitem(check_that_they_fit.__globals__["MOST_SPILLED"], ENTRY, MOST_SPILLED)
    machine, plans = MACHINES[architecture], {}
    for length, width, features, loads in COMPILED:
        # All of them for an H200, the usual ones for others.
        for pairs, (warps, blocks) in itertools.product((8,), loads if architecture == "sm_90" else loads[:1]):
            in_registers(pairs, warps, blocks)
            shape = Shape(BF16, 8, width, width, True)
            plan = plan_line(machine, shape, length, length, 256, backward=True, **features)
            assert plan is not None
            if plan.kernel.entry == ENTRY:
                plans[plan] = None
    assert len(plans) >= len(COMPILED) - 1
    check_that_they_fit(machine, compile_all([plan.kernel for plan in plans], architecture, workers=2), plans)


def test_which_lines_go_this_way(in_registers):
    machine = MACHINES["sm_90"]
    narrow = Shape(BF16, 8, 8, 8, True)

    def entry(shape, length, **features):
        return plan_line(machine, shape, length, 8, 8, backward=True, **(NOTHING | features)).kernel.entry

    assert entry(narrow, 9) == entry(narrow, 64) == ENTRY
    assert entry(narrow, 8) == entry(narrow, 16, pool=True) == "line_backward"
    assert entry(replace(narrow, dtype=torch.float32), 16) == "line_backward"
    assert entry(narrow, 65) == "line_backward_pieces"
    assert entry(replace(narrow, key=64), 64) != ENTRY  # the sums alone are more than a thread has registers


def test_a_table_says_which(monkeypatch):
    machine, shape = MACHINES["sm_90"], Shape(BF16, 8, 8, 8, True)
    line_plans.plan_line.cache_clear()
    assert plan_line(machine, shape, 56, 56, 8, backward=True, **ROW).kernel.entry == "line_backward"
    monkeypatch.setitem(line_plans.IN_REGISTERS, (56, 8, 8, "row's gradient"), (16, 4, 2))
    line_plans.plan_line.cache_clear()
    plan = plan_line(machine, shape, 56, 56, 8, backward=True, **ROW)
    constants = dict(plan.kernel.constants)
    assert plan.kernel.entry == ENTRY
    assert (constants["HEADS"], constants["LINES"], constants["WARPS"], constants["BLOCKS"]) == (8, 2, 4, 2)
    assert plan_line(machine, shape, 56, 56, 8, backward=True, **COLUMN).kernel.entry == "line_backward"
    line_plans.plan_line.cache_clear()
