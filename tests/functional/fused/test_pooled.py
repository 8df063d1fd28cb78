"""Modules with stride 2: the scores of two neighbours are added up before they meet the values, `kernels/scores.cuh`.

Only lines of more than eight pixels; shorter ones are bundled, and averaged as they are stored (`test_short_lines.py`).
Those that are longer than a block holds are in `test_pieces.py`.
"""

import itertools

import pytest
import torch
from functional.fused.test_kernels import (
    ALONE,
    BF16,
    COLUMN,
    FLOAT,
    HALF,
    MACHINES,
    ROW,
    check_close,
    check_module,
    make_module,
    normal,
    step,
)

from gsanet.functional import positional_attention, use_backend
from gsanet.functional.fused import calls
from gsanet.functional.fused.plan import Machine, Shape, plan_line
from gsanet.functional.fused.plan.shape import round_up


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        # Up to eight means on a line, up to sixteen and more, the last ones of a product there or not.
        (BF16, 2, 32, (2, 10), ROW | {"num_heads": 2}),
        (FLOAT, 1, 16, (16, 4), COLUMN | {"num_heads": 2}),
        (HALF, 1, 64, (4, 18), ROW),
        (BF16, 1, 32, (40, 2), COLUMN | ALONE | {"num_heads": 4}),
        (BF16, 1, 128, (2, 56), {}),  # 16 warps in the gradient
        # Padded heads, wide ones, keys and values of different widths, moved one at a time.
        (FLOAT, 1, 20, (2, 14), ROW | {"num_heads": 3, "dim_key": 27, "dim_out": 60}),
        (BF16, 1, 16, (34, 2), COLUMN | {"num_heads": 1, "dim_key": 12, "dim_out": 64}),
    ],
    ids=str,
)
def test_module(kernels, dtype, batch, dim, size, options):
    module = make_module(dtype, dim, size, stride=2, **options).train()
    check_module(kernels, module, dtype, batch, size)
    for entry in ("line_forward", "line_backward"):
        assert any(constants["POOL"] and constants["LENGTH"] > 8 for constants in kernels.constants(entry))


@pytest.mark.parametrize(
    ("bad", "width", "dim_key", "dim_out"), [(float("nan"), 10, 64, 64), (float("inf"), 22, 24, 40)]
)
def test_a_bad_image_stays_alone(kernels, bad, width, dim_key, dim_out):
    """With padded heads and others; in a block there are several images at a time, and others come after them."""
    module = make_module(BF16, 24, (2, width), num_heads=2, dim_key=dim_key, dim_out=dim_out, stride=2, **ROW)
    module.to(kernels.device)
    kernels.machine = Machine(1, 227 * 1024, 228 * 1024)  # of the host: all lines in one block
    x = normal(9, 24, 2, width, dtype=BF16).to(kernels.device, memory_format=torch.channels_last)
    d_out = normal(9, dim_out, 1, width // 2, dtype=BF16, seed=1).to(kernels.device)
    worse, good = x.clone(), [1, 2, 4, 5, 7, 8]
    worse[::3] = bad
    with kernels.running():
        expected, found = (step(module, one, d_out) for one in (x, worse))
    for name in ("output", "gradient of x"):
        assert torch.equal(found[name][good], expected[name][good]), name
        assert not found[name][::3].isfinite().any()


def test_statistics_are_those_of_the_means(kernels):
    q, v = (normal(2, 4, 12, 2, 8, dtype=FLOAT, seed=seed).to(kernels.device) for seed in range(2))
    rel, centre = (normal(*shape, dtype=FLOAT, seed=2).to(kernels.device) for shape in ((23, 8), (16,)))
    with kernels.running():
        out, statistics = calls.attend(q, v, rel, "row", pool=True, centre=centre)
    with use_backend("reference"):
        exact = positional_attention(q.double(), v.double(), rel.double(), "row")
    means = exact.unflatten(2, (6, 2)).unflatten(1, (2, 2)).mean((2, 4))
    check_close("output", out, means, FLOAT)
    distances = (means.flatten(3) - centre.double()).flatten(0, 2)
    for found, power in zip(statistics.sum(0), (1, 2), strict=True):
        check_close(f"sum of powers of {power}", found, distances.pow(power).sum(0), FLOAT)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_four_pixels_have_one_gradient_in_shared_memory(machine):
    compared = 0
    for dtype, width, length, heads in itertools.product((FLOAT, BF16), (8, 16, 32), (10, 28, 56, 64), (1, 8)):
        shape = Shape(dtype, heads, width, width, True)
        each, one = (plan_line(machine, shape, length, 64, 8, backward=True, pool=pool) for pool in (False, True))
        constants = dict(one.kernel.constants)
        if constants != dict(each.kernel.constants) | {"POOL": 1}:
            continue  # another cut
        head = width if width < 32 else shape.odd_stride(width)
        lines, pixel = constants["LINES"], shape.odd_stride(constants["HEADS"] * head)
        pixels = lines * round_up(constants["LENGTH"], 16) - lines // 2 * round_up(constants["LENGTH"] // 2, 16)
        assert each.shared_bytes - one.shared_bytes == pixels * pixel * shape.size, (shape, length)
        compared += 1
    assert compared >= 20
