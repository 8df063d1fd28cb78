"""Attention along lines with scores in registers, a pair of a line and a head by one warp: `kernels/skewed_scores.cuh`.

By default those layers are planned so that are faster for it. Here all are, and `registers` says how they are cut:
(pairs, warps, blocks).
"""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from functional.fused.test_instantiations import MACHINES, check_that_they_fit
from functional.fused.test_kernels import BF16, COLUMN, FLOAT, HALF, ROW, check_close, make_module, normal, same_bits

from gsanet.functional import content_attention, positional_attention, use_backend
from gsanet.functional.fused import calls
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.plan import Shape, plan_line
from gsanet.functional.fused.plan import lines as line_plans


@pytest.fixture
def registers(kernels, monkeypatch):
    """Kernels of this way only, cut as for a large batch; `registers(pairs, warps, blocks)` cuts otherwise."""

    def cut(*numbers):
        monkeypatch.setattr(line_plans, "_in_registers", lambda *_: [numbers])
        plan_line.cache_clear()
        return kernels

    machine = launching.machine
    monkeypatch.setattr(launching, "machine", lambda device: replace(machine(device), multiprocessors=1))
    cut(8, 4, 2)
    yield cut
    plan_line.cache_clear()


def check_attention(kernels, dtype, size, heads, key, value, axis, **features):
    """`attend` with features against what they say, in float64; and the same bits in any order."""
    length = size[1] if axis == "column" else size[2]
    channels, table = heads * value, normal(2 * length - 1, key, dtype=dtype, seed=3).to(kernels.device)
    q, v = (normal(*size, heads, width, dtype=dtype, seed=width).to(kernels.device) for width in (key, value))
    scales = normal(5, channels, dtype=FLOAT, seed=4).to(kernels.device)
    norm, finish, centre = scales[:2], scales[2:4], scales[4]
    options, expected = {}, v.double()
    if features.get("norm"):
        options["norm"] = norm
        expected = expected * norm[0].double().unflatten(0, (heads, -1)) + norm[1].double().unflatten(0, (heads, -1))
        expected = expected.to(dtype).double()
    with use_backend("reference"):
        expected = positional_attention(q.double(), expected, table.double(), axis)
        if features.get("content"):
            k = normal(*size, heads, key, dtype=dtype, seed=5).to(kernels.device)
            expected = expected + content_attention(q.double(), k.double(), v.double())
    if features.get("pool"):
        expected = expected.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4))
    expected = expected.flatten(3)
    if features.get("finish"):
        options["finish"], expected = finish, (expected * finish[0].double() + finish[1].double()).relu()
    if features.get("statistics"):
        options["centre"] = centre

    def attend():
        with kernels.running():
            context = calls.context_vectors(k, v).turned if features.get("content") else None
            kernels.launched.clear()
            early = features.get("early", False)
            return calls.attend(
                q, v, table, axis, **options, context=context, pool=features.get("pool", False), early_table=early
            )

    out, sums = attend()
    (constants,) = kernels.constants("line_forward")
    assert constants["IN_REGISTERS"]
    check_close("output", out.flatten(3), expected, dtype)
    if sums is not None:
        distances = (out.flatten(3).double() - centre.double()).flatten(0, 2)
        for power in (1, 2):
            # Taken before they are rounded.
            usual = distances.abs().pow(power).sum(0)
            assert ((sums[:, power - 1].sum(0) - distances.pow(power).sum(0)).abs() <= 1e-2 * usual).all()
    for _ in kernels.other_orders():
        again = attend()
        assert same_bits([one for one in again if one is not None], [one for one in (out, sums) if one is not None])
    return constants


FEATURES = ("norm", "content", "finish", "statistics", "early")


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value", "axis", "features"),
    [
        # All lengths of the networks and on both sides of groups of 8 and 16 pixels, heads of 8, 16 and 32 channels.
        (BF16, (1, 56, 3), 8, 8, 8, "column", ("statistics", "early")),
        (BF16, (1, 3, 56), 8, 8, 8, "row", ("norm", "content")),
        (HALF, (1, 2, 28), 8, 16, 16, "row", ("norm", "content", "finish")),
        (BF16, (1, 28, 2), 4, 32, 32, "column", ("statistics",)),
        (BF16, (3, 14, 1), 8, 32, 32, "column", ("norm", "content")),
        (BF16, (1, 3, 14), 8, 16, 32, "row", ()),
        (HALF, (2, 16, 2), 8, 16, 16, "column", FEATURES),
        (BF16, (1, 2, 32), 8, 8, 8, "row", ("content", "statistics")),
        (BF16, (1, 20, 3), 2, 16, 8, "column", ("content",)),
        (HALF, (1, 2, 64), 4, 8, 16, "row", ("norm",)),
        (BF16, (5, 2, 9), 1, 8, 32, "row", ("finish",)),
        (BF16, (1, 41, 1), 4, 16, 16, "column", ()),
        # Padded heads, moved one at a time; wide ones, whose values and context vectors do not stay in registers.
        (BF16, (2, 9, 2), 3, 12, 20, "column", ("content", "finish")),
        (HALF, (1, 2, 20), 6, 9, 4, "row", ("norm", "content", "statistics")),
        (BF16, (1, 24, 1), 1, 128, 40, "column", ("content",)),
        (BF16, (1, 1, 56), 2, 24, 64, "row", ("content",)),
        # Averaged.
        (BF16, (1, 4, 28), 4, 16, 16, "row", ("norm", "content", "pool")),
        (HALF, (1, 18, 2), 3, 12, 8, "column", ("pool", "finish")),
    ],
)
def test_attention(registers, dtype, size, heads, key, value, axis, features):
    lines = size[0] * size[2 if axis == "column" else 1]
    kernels = registers(min(16 if heads == 8 or "pool" in features else 8, lines * heads), 4, 2)
    constants = check_attention(kernels, dtype, size, heads, key, value, axis, **dict.fromkeys(features, True))
    assert constants["VECTOR"] == (key % 8 == value % 8 == 0)


@pytest.mark.parametrize("cut", [(8, 8, 2), (16, 8, 5), (4, 4, 1)], ids=str)
def test_other_cuts(registers, cut):
    """A warp for each pair, two pairs one after the other, and few registers, where the table is read each time."""
    constants = check_attention(registers(*cut), BF16, (2, 17, 3), 4, 16, 16, "column", content=True, statistics=True)
    assert (constants["HEADS"] * constants["LINES"], constants["WARPS"], constants["BLOCKS"]) == cut


def forward(module, x):
    with torch.no_grad():
        return [module(x), *(buffer.clone() for buffer in module.buffers())]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("dtype", "dim", "size", "options"),
    [
        (BF16, 64, (14, 9), {}),
        (HALF, 36, (10, 20), {"num_heads": 4, "content": False}),
        (BF16, 32, (12, 16), {"num_heads": 4, "stride": 2}),
        (BF16, 16, (28, 2), COLUMN | {"num_heads": 2, "dim_key": 24, "dim_out": 64}),
        (HALF, 64, (2, 32), ROW | {"num_heads": 4}),
    ],
    ids=str,
)
def test_module(registers, training, dtype, dim, size, options):
    kernels = registers(8, 4, 2)
    module = make_module(dtype, dim, size, **options).to(kernels.device).train(training)
    exact = copy.deepcopy(module).double()
    x = normal(2, dim, *size, dtype=dtype).to(kernels.device, memory_format=torch.channels_last)
    with use_backend("reference"):
        expected = forward(exact, x.double())
    with kernels.running():
        before = copy.deepcopy(module)
        found = forward(module, x)
        for name, one, other in zip(("output", *dict(module.named_buffers())), found, expected, strict=True):
            check_close(name, one, other, dtype)
        for _ in kernels.other_orders():
            assert same_bits(forward(copy.deepcopy(before), x), found), f"{kernels.order} order differs"
        assert same_bits(forward(copy.deepcopy(before), x), found), "two runs differ"
    used = [constants["IN_REGISTERS"] for constants in kernels.constants("line_forward") if constants["LENGTH"] > 8]
    assert used
    assert all(used)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("length", "heads", "width"), [(10, 2, 12), (14, 4, 16), (20, 2, 40)])
def test_a_bad_image_stays_alone(registers, bad, length, heads, width):
    """A block has lines of several images at a time, and others after them; with padded heads and others."""
    kernels = registers(8, 4, 1)
    q, v = (normal(9, length, 1, heads, width, dtype=BF16, seed=seed).to(kernels.device) for seed in range(2))
    rel = normal(2 * length - 1, width, dtype=BF16).to(kernels.device)
    good = [1, 2, 4, 5, 7, 8]
    with kernels.running(), torch.no_grad():
        expected = positional_attention(q, v, rel, "column")
        q[::3], v[::3] = bad, bad
        found = positional_attention(q, v, rel, "column")
    assert all(constants["IN_REGISTERS"] for constants in kernels.constants("line_forward"))
    assert torch.equal(found[good], expected[good])
    assert not found[::3].isfinite().any()


def test_float32_long_lines_and_small_batches_are_planned_as_ever(registers):
    machine, usual = MACHINES["sm_90"], {"backward": False, "statistics": True}
    for dtype, length, images, in_registers in (
        (BF16, 28, 64, True),
        (FLOAT, 28, 64, False),
        (BF16, 28, 1, False),
        (BF16, 66, 64, False),
        (BF16, 8, 64, False),
    ):
        plan = plan_line(machine, Shape(dtype, 8, 16, 16, True), length, 28, images, **usual)
        assert dict(plan.kernel.constants)["IN_REGISTERS"] == in_registers


def planned_cut(architecture, length, width, **features):
    """(pairs, warps, blocks) of a large batch, or None where scores are in shared memory."""
    plan_line.cache_clear()
    shape = Shape(BF16, 8, width, width, True)
    plan = plan_line(MACHINES[architecture], shape, length, 56, 256, backward=False, **features)
    constants = dict(plan.kernel.constants)
    cut = (constants["HEADS"] * constants["LINES"], constants["WARPS"], constants["BLOCKS"])
    return cut if constants["IN_REGISTERS"] else None


def test_which_layers_are_planned_so():
    columns, rows, pooled = {"statistics": True}, {"content": True}, {"content": True, "pool": True}
    for length, width, features, cut in (
        (56, 8, columns, (16, 4, 4)),
        (32, 8, columns, (16, 4, 5)),
        (56, 16, columns, (8, 4, 4)),  # more does not fit
        (14, 64, columns, (8, 4, 4)),
        (14, 128, columns, None),
        (56, 8, rows, (8, 4, 5)),
        (28, 16, rows, (8, 4, 5)),
        (14, 32, rows, None),
        (16, 16, rows, None),
        (56, 16, pooled, (8, 4, 5)),
        (32, 16, pooled, None),
    ):
        assert planned_cut("sm_90", length, width, **features) == cut, (length, width, features)
    assert planned_cut("sm_80", 56, 32, **columns) is None  # four blocks have no room there


COLUMNS, ROWS = {"statistics": True}, {"norm_values": True, "content": True}
NAMES = ("norm_values", "content", "pool", "finish", "statistics", "early_table")
# (length, width): cuts of blocks with eight heads.
CUTS = {
    (56, 8): [(8, 4, 4), (8, 4, 5), (16, 8, 2)],
    (32, 8): [(8, 4, 5), (16, 8, 2)],
    (28, 16): [(8, 4, 4), (16, 8, 2)],
    (16, 16): [(8, 4, 4), (16, 8, 2)],
    (14, 32): [(8, 4, 4), (16, 8, 2)],
}


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("architecture", MACHINES)
def test_they_compile_and_fit(registers, architecture):
    """Of the shapes of the networks, with eight heads."""
    machine = replace(MACHINES[architecture], multiprocessors=1)
    wanted = [(*key, cut, kind) for key, cuts in CUTS.items() for cut, kind in itertools.product(cuts, (COLUMNS, ROWS))]
    wanted += [(56, 16, (8, 4, 4), COLUMNS), (28, 32, (8, 4, 4), COLUMNS)]  # columns of modules that average
    plans = {}
    for length, width, cut, kind in wanted:
        registers(*cut)
        features = {name: kind.get(name, False) for name in NAMES}
        plan = plan_line(machine, Shape(BF16, 8, width, width, True), length, 56, 256, backward=False, **features)
        plans[plan] = None
    check_that_they_fit(machine, compile_all([plan.kernel for plan in plans], architecture, workers=2), plans)
