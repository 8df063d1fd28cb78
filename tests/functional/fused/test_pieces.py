"""Gradients of lines that are longer than a block holds, in pieces: `kernels/line_backward_pieces.cu`.

Pieces are short here, so that few pixels make several of them: `BAND`, the most pixels that are held at a time, is a
constant that the kernels are compiled with. The tests for GPUs only, at the end, leave it as it is.
"""

import copy
import itertools

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
    step,
)

from gsanet.functional.fused.plan import Machine, Shape, plan_line
from gsanet.functional.fused.plan import lines as line_plans

ALONE = {"content": False}


@pytest.fixture
def short(kernels, monkeypatch):
    """Kernels that hold 16 pixels of a line at a time."""
    monkeypatch.setattr(line_plans, "BAND", 16)
    plan_line.cache_clear()
    yield kernels
    plan_line.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value", "axis"),
    [
        (FLOAT, (1, 33, 3), 8, 8, 8, "column"),
        (BF16, (1, 1, 80), 8, 8, 8, "row"),  # five pieces, each of which is added in 16 bits
        (HALF, (1, 3, 17), 3, 12, 20, "row"),
        (BF16, (1, 20, 3), 2, 9, 16, "column"),
        (FLOAT, (1, 2, 50), 1, 9, 4, "row"),
    ],
)
def test_positional_attention(short, dtype, size, heads, key, value, axis):
    check_positional(short, dtype, size, heads, key, value, axis)
    assert "line_backward_pieces" in short.entries


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        (FLOAT, 2, 64, (18, 17), {}),
        (BF16, 2, 64, (20, 34), {"stride": 2}),
        (HALF, 1, 32, (7, 21), {"num_heads": 4, "content": False}),
        (BF16, 1, 40, (22, 9), {"num_heads": 2, "dim_key": 16, "dim_out": 32}),
        (BF16, 3, 64, (34, 2), COLUMN | {"stride": 2}),
        (FLOAT, 1, 20, (3, 19), ROW | {"num_heads": 3, "dim_key": 27, "dim_out": 60}),  # moved one at a time
        (HALF, 1, 32, (2, 33), ROW | ALONE | {"num_heads": 4, "reach": 20}),
    ],
    ids=str,
)
def test_module(short, dtype, batch, dim, size, options):
    module = make_module(dtype, dim, size, **options).train()
    check_module(short, module, dtype, batch, size)
    for constants in short.constants("line_backward_pieces"):
        assert constants["LENGTH"] == 16
    assert short.constants("line_backward_pieces")


def test_a_bad_image_stays_alone(short):
    """Heads are padded here, and what a bad image leaves in the padding does not reach the next one."""
    module = make_module(BF16, 24, (18, 3), num_heads=2, dim_key=18, dim_out=40, row=False).to(short.device)
    x = normal(3, 24, 18, 3, dtype=BF16).to(short.device, memory_format=torch.channels_last)
    worse = x.clone()
    worse[1] = float("nan")
    short.machine = Machine(1, 227 * 1024, 228 * 1024)  # of the host: all lines in one block
    with short.running():
        d_out = normal(3, 40, 18, 3, dtype=BF16).to(short.device)
        expected, found = (step(module, one, d_out)["gradient of x"] for one in (x, worse))
    assert "line_backward_pieces" in short.entries
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert found[1].isnan().all()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_what_is_attended_is_differentiated(machine):
    """Any layer that fits into the forward kernel there, of any width, has a kernel of the gradients."""
    kinds = [{"statistics": True}, {"content_keys": True}]
    shapes = itertools.product((FLOAT, BF16), (1, 6, 8), (4, 9, 32, 64, 128), (8, 48, 128))
    for (dtype, heads, key, value), pool in itertools.product(shapes, (False, True)):
        shape = Shape(dtype, heads, key, value, vector=False)
        for length in (2, 14, 16, 24, 42, 64, 65, 112, 320):
            if plan_line(machine, shape, length, 1, 1, backward=False, pool=pool) is None:
                continue
            for lines, features in itertools.product((1, 1000), kinds):
                gradient = plan_line(machine, shape, length, lines, 8, backward=True, pool=pool, **features)
                assert gradient is not None, (shape, length, features)
                assert gradient.shared_bytes <= machine.shared_memory


def test_pieces_of_a_line():
    """The fewest that fit, of about one length."""
    h200 = Machine(132, 227 * 1024, 228 * 1024)
    for (length, width), piece in {(112, 8): 56, (160, 8): 56, (320, 8): 64, (65, 8): 40, (100, 32): 32}.items():
        shape = Shape(BF16, 8, width, width, True)
        gradient = plan_line(h200, shape, length, 1000, 1, backward=True, content_keys=True)
        assert dict(gradient.kernel.constants)["LENGTH"] == piece, length
    # One compiled kernel serves lines of many lengths.
    one, other = (
        plan_line(h200, Shape(BF16, 8, 8, 8, True), length, 1000, 1, backward=True).kernel for length in (98, 112)
    )
    assert one == other


# --- As long as they are, on a GPU.


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        (BF16, 2, 64, (112, 112), {}),
        (BF16, 2, 64, (112, 112), {"stride": 2}),
        (FLOAT, 1, 64, (112, 112), {}),
        (HALF, 1, 64, (160, 96), {}),
        (BF16, 1, 64, (320, 320), {}),
        (FLOAT, 1, 64, (320, 8), COLUMN),
        (BF16, 1, 128, (100, 168), {}),
        (BF16, 1, 256, (50, 84), {"stride": 2}),
        (BF16, 1, 512, (26, 42), {"stride": 2}),
        (FLOAT, 1, 256, (84, 50), {}),
        (BF16, 2, 20, (65, 100), COLUMN | {"num_heads": 3, "dim_key": 27, "dim_out": 60}),
        (FLOAT, 2, 20, (65, 100), ROW | {"num_heads": 3, "dim_key": 27, "dim_out": 60}),
    ],
    ids=str,
)
def test_long_lines_on_gpu(gpu, dtype, batch, dim, size, options):
    module = make_module(dtype, dim, size, **options).train()
    found = check_module(gpu, module, dtype, batch, size)
    assert "line_backward_pieces" in gpu.entries
    x = normal(batch, dim, *size, dtype=dtype).cuda().to(memory_format=torch.channels_last)
    d_out = normal(*found["output"].shape, dtype=dtype, seed=7).cuda()
    with gpu.running():
        # Copies: the variance is taken about the running mean, so that a second step of one module rounds otherwise.
        one, other = (step(copy.deepcopy(module), x, d_out) for _ in range(2))
    for name, value in one.items():
        if name.startswith("gradient"):
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value", "axis"),
    [
        (BF16, (2, 65, 100), 3, 9, 20, "row"),
        (FLOAT, (1, 65, 100), 3, 20, 9, "column"),
        (HALF, (1, 320, 3), 8, 8, 8, "column"),
        (BF16, (1, 3, 320), 2, 12, 100, "row"),
        (FLOAT, (1, 100, 5), 2, 64, 64, "column"),
        (BF16, (1, 70, 5), 2, 128, 128, "column"),
    ],
)
def test_positional_attention_of_long_lines_on_gpu(gpu, dtype, size, heads, key, value, axis):
    check_positional(gpu, dtype, size, heads, key, value, axis)
    assert "line_backward_pieces" in gpu.entries
