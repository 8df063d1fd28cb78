"""Lines of at most eight pixels, several of which share the rows of a product: bundles, `kernels/tiles.cuh`."""

import pytest
import torch
from functional.fused.test_kernels import (
    BF16,
    COLUMN,
    FLOAT,
    HALF,
    MACHINES,
    ROW,
    check_module,
    check_positional,
    make_module,
    normal,
)

from gsanet.functional import positional_attention
from gsanet.functional.fused.plan import Machine, Shape, bundle_of, plan_line


@pytest.fixture
def crowded(kernels):
    """As in a large batch: on the host one multiprocessor, whose blocks have as many lines as they ever have."""
    kernels.machine = Machine(1, 227 * 1024, 228 * 1024)
    return kernels


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value", "axis"),
    [
        # All lengths, each with lines that leave a part of the last bundle empty.
        (BF16, (2, 1, 6), 8, 8, 8, "column"),
        (FLOAT, (2, 5, 2), 8, 8, 8, "row"),
        (HALF, (2, 3, 7), 8, 8, 8, "column"),
        (BF16, (3, 7, 4), 8, 16, 16, "row"),
        (HALF, (2, 3, 6), 8, 16, 8, "row"),
        (BF16, (3, 7, 7), 8, 8, 8, "column"),
        (FLOAT, (2, 5, 8), 4, 8, 12, "row"),
        # Padded heads, numbers of them that leave places of a product empty, a single line and many.
        (FLOAT, (2, 7, 5), 5, 9, 20, "row"),
        (BF16, (2, 8, 25), 6, 12, 4, "column"),
        (BF16, (3, 1, 8), 1, 4, 24, "row"),
        (BF16, (1, 4, 4), 2, 64, 40, "column"),
    ],
)
def test_positional_attention(crowded, dtype, size, heads, key, value, axis):
    check_positional(crowded, dtype, size, heads, key, value, axis)
    for constants in (*crowded.constants("line_forward"), *crowded.constants("line_backward")):
        assert constants["LINES"] % bundle_of(constants["LENGTH"]) == 0


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        (HALF, 3, 64, (4, 7), {}),
        (BF16, 2, 64, (6, 4), {"stride": 2}),  # the last two of eight lines do not exist
        (BF16, 2, 128, (7, 5), {"num_heads": 2}),  # few heads and many lines: context vectors are larger than lines
        (BF16, 1, 96, (8, 6), ROW | {"num_heads": 2, "stride": 2}),
        (FLOAT, 2, 20, (3, 5), COLUMN | {"num_heads": 3, "dim_key": 15, "dim_out": 30}),  # moved one at a time
    ],
    ids=str,
)
def test_module(crowded, dtype, batch, dim, size, options):
    check_module(crowded, make_module(dtype, dim, size, **options).train(), dtype, batch, size)
    if options.get("num_heads") == 2:
        assert any(constants["LINES"] > 4 for constants in crowded.constants("line_backward"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("size", "width"), [((7, 5), 16), ((3, 6), 16), ((5, 3), 12), ((9, 5), 12)])
def test_a_bad_image_stays_alone(crowded, size, width, bad):
    """Whatever mixes the lines of a bundle, or stays in the padding of pixels or channels, reaches no other image."""
    shape, good = (9, *size, 4, width), [1, 2, 4, 5, 7, 8]  # a block has several images, one after the other
    q, v, d_out = (normal(*shape, dtype=BF16, seed=seed).to(crowded.device) for seed in range(3))
    rel = normal(2 * size[0] - 1, width, dtype=BF16).to(crowded.device)

    def attend(q, v):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, v)]
        out = positional_attention(*leaves, rel, "column")
        return out.detach(), *torch.autograd.grad(out, leaves, d_out)

    with crowded.running():
        expected = attend(q, v)
        q[::3], v[::3] = bad, bad
        found = attend(q, v)
    for value, usual in zip(found, expected, strict=True):
        assert torch.equal(value[good], usual[good])
    assert not found[0][::3].isfinite().any()


def test_lines_left_over_are_not_read_or_written(crowded):
    """Five lines take the room of six or eight: next to them lie others that must not change."""
    whole = normal(1, 4, 9, 8, 8, dtype=BF16).to(crowded.device)
    rel = normal(7, 8, dtype=BF16).to(crowded.device)
    with crowded.running(), torch.no_grad():
        out = positional_attention(whole[:, :, :5], whole[:, :, :5], rel, "column")
        worse = whole.clone()
        worse[:, :, 5:] = float("nan")
        assert torch.equal(positional_attention(worse[:, :, :5], worse[:, :, :5], rel, "column"), out)


def cut(launch):
    constants = dict(launch.kernel.constants)
    return constants["HEADS"], constants["LINES"]


def test_cuts():
    """Whole heads of one bundle; of wide heads with content attention, lines that share their context vectors."""
    h200 = MACHINES["H200"]
    for length, width, content, expected in (
        (8, 32, True, (8, 2)),
        (4, 64, True, (8, 4)),
        (8, 64, False, (8, 2)),
        (8, 64, True, (2, 8)),
        (7, 64, True, (2, 8)),
        (5, 64, True, (4, 4)),
    ):
        shape = Shape(BF16, 8, width, width, True)
        for backward, feature in ((False, "content"), (True, "content_keys")):
            plan = plan_line(h200, shape, length, length, 512, backward=backward, **{feature: content})
            assert cut(plan) == expected, (length, width)
    # One block where queries and keys of content attention are in one kernel.
    for features, blocks in ({"content_keys": True}, 2), ({"content_keys": True, "content_queries": True}, 1):
        plan = plan_line(h200, Shape(BF16, 8, 64, 64, True), 8, 8, 512, backward=True, **features)
        assert dict(plan.kernel.constants)["BLOCKS"] == blocks
    # One image: more and smaller blocks.
    plan = plan_line(h200, Shape(BF16, 8, 64, 64, True), 7, 7, 1, backward=False, content=True)
    assert cut(plan) == (1, 2)
    assert plan.grid == (4, 8)
