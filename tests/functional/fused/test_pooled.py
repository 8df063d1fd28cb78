"""Modules with stride 2: scores of two neighbouring pixels are added up before they meet the values, `kernels/scores.cuh`."""

import pytest
import torch
from functional.fused.test_kernels import BF16, CONTENT, FLOAT, HALF, check_module, make_module, normal, step

from gsanet.functional.fused.plan import Machine

ROW, COLUMN = {"column": False, "stride": 2}, {"row": False, "stride": 2}
ALONE = {"content": False}


@pytest.mark.parametrize(
    ("dtype", "batch", "dim", "size", "options"),
    [
        # Up to eight places on a line, up to sixteen and more; the last sixteen full or not.
        (BF16, 2, 32, (2, 10), ROW | {"num_heads": 2}),
        (FLOAT, 1, 16, (16, 4), COLUMN | {"num_heads": 2}),
        (HALF, 1, 64, (4, 18), ROW | {"num_heads": 8}),
        (FLOAT, 1, 16, (32, 2), COLUMN | ALONE | {"num_heads": 1}),
        (BF16, 1, 32, (2, 40), ROW | {"num_heads": 4}),
        (BF16, 1, 128, (2, 56), {"stride": 2}),
        (FLOAT, 1, 8, (64, 2), COLUMN | {"num_heads": 1}),
        # Longer than a block holds.
        (BF16, 1, 16, (2, 74), ROW | {"num_heads": 2}),
        # Padded heads, wide ones, keys and values of different widths, moved one at a time.
        (FLOAT, 1, 20, (2, 14), ROW | {"num_heads": 3, "dim_key": 27, "dim_out": 60}),
        (BF16, 2, 24, (4, 22), ROW | {"num_heads": 2, "dim_key": 18, "dim_out": 40}),
        (BF16, 1, 16, (14, 2), COLUMN | {"num_heads": 1, "dim_key": 128, "dim_out": 64}),
        (HALF, 1, 16, (2, 12), CONTENT | {"num_heads": 2, "dim_key": 8, "dim_out": 64, "stride": 2}),
    ],
    ids=str,
)
def test_module(kernels, dtype, batch, dim, size, options):
    check_module(kernels, make_module(dtype, dim, size, **options).train(), dtype, batch, size)
    assert any(constants["POOL"] for constants in kernels.constants("line_forward"))
