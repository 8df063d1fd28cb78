"""Gradients of lines that are longer than a block holds, in pieces: `kernels/line_backward_pieces.cu`.

On the host pieces are short, so that few pixels make several of them: the kernels' sources take the longest line that they
hold as a whole as a constant, `BAND`.
"""

import pytest
import torch
from functional.fused.test_kernels import (
    BF16,
    COLUMN,
    CONTENT,
    FLOAT,
    HALF,
    ROW,
    check_module,
    check_positional,
    make_module,
)

from gsanet.functional.fused import plan


@pytest.fixture
def short(kernels, monkeypatch):
    """Kernels that hold 16 pixels of a line at a time, where they run on the host."""
    if kernels.device == "cpu":
        monkeypatch.setattr(plan, "BAND", 16)
        plan.plan_line.cache_clear()
    yield kernels
    plan.plan_line.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "key", "value", "axis"),
    [
        (FLOAT, (1, 33, 3), 8, 8, 8, "column"),
        (BF16, (2, 3, 40), 8, 8, 8, "row"),
        (HALF, (1, 3, 17), 3, 12, 20, "row"),
        (BF16, (1, 20, 3), 2, 9, 16, "column"),
        (FLOAT, (1, 2, 50), 1, 9, 4, "row"),
    ],
)
def test_positional_attention_in_pieces(short, dtype, size, heads, key, value, axis):
    check_positional(short, dtype, size, heads, key, value, axis)


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        (FLOAT, 2, 64, (18, 20), {}),
        (BF16, 1, 64, (33, 20), {"stride": 1}),
        (BF16, 2, 64, (24, 34), {"stride": 2}),
        (HALF, 1, 32, (7, 21), {"num_heads": 4, "content": False}),
        (FLOAT, 1, 40, (22, 9), {"num_heads": 2, "dim_key": 16, "dim_out": 32}),
    ],
)
def test_module_in_pieces(short, dtype, batch, dim, size, options):
    check_module(short, make_module(dtype, dim, size, **options).train(), dtype, batch, size)
