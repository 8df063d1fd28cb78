"""Position-sensitive attention's equation, and sums of its scores, against explicit loops."""

import pytest
import torch
from torch.testing import assert_close

from gsanet.functional.position_sensitive import attend_by_products, split, sum_scores


def brute_scores(projected, tables):
    """The three parts, (part, batch, y, head, x, i); in `tables` keys see offsets from where they are."""
    batch, length, lines, heads, _ = projected.shape
    q, k, _ = split(projected)
    f, g, _ = split(tables)
    scores = projected.new_empty(3, batch, lines, heads, length, length)
    for x in range(length):
        for i in range(length):
            scores[0, ..., x, i] = (q[:, x] * k[:, i]).sum(-1)
            scores[1, ..., x, i] = (q[:, x] * f[:, length - 1 + i - x]).sum(-1)
            scores[2, ..., x, i] = (k[:, i] * g[:, length - 1 + x - i]).sum(-1)
    return scores


@pytest.mark.parametrize("length", [1, 5])
def test_the_equation(length):
    projected = torch.randn(2, length, 3, 2, 16, dtype=torch.float64)
    tables = torch.randn(2, 2 * length - 1, 16, dtype=torch.float64)
    content = torch.randn(2, dtype=torch.float64)
    parts = brute_scores(projected, tables)
    weights = (content[:, None, None] * parts[0] + parts[1] + parts[2]).softmax(-1)
    v, h = split(projected)[2], split(tables)[2]
    out = torch.zeros(2, length, 3, 2, 2, 8, dtype=torch.float64)
    for x in range(length):
        for i in range(length):
            weight = weights[..., x, i, None]
            out[:, x, :, 0] += weight * v[:, i]
            out[:, x, :, 1] += weight * h[:, length - 1 + i - x]
    assert_close(attend_by_products(projected, tables, content), out)


@pytest.mark.parametrize("length", [1, 5])
def test_sums_of_scores(length):
    projected = torch.randn(2, length, 3, 2, 16, dtype=torch.float64)
    table = torch.randn(2 * length - 1, 16, dtype=torch.float64)
    scores = brute_scores(projected, table.expand(2, -1, -1))
    sums = sum_scores(projected, table)
    assert_close(sums[0], scores.sum(dim=(1, 2, 4, 5)))
    assert_close(sums[1], scores.square().sum(dim=(1, 2, 4, 5)))
    assert sum_scores(projected.bfloat16(), table.bfloat16()).dtype == torch.float32
