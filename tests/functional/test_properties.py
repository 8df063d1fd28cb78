"""What the equations promise, without looking at how they are computed."""

import pytest
import torch
from helpers import maps, relative_error, table
from torch.testing import assert_close

from gsanet.functional import content_attention, global_self_attention, positional_attention

SHAPE = (2, 6, 5, 2)
K, V = 4, 3


def shuffle(x, order):
    return x.flatten(1, 2)[:, order].unflatten(1, x.shape[1:3])


def test_content_commutes_with_shuffling(backend):
    q, k, v = maps(SHAPE, K, V)
    order = torch.randperm(SHAPE[1] * SHAPE[2])
    shuffled = content_attention(*(shuffle(x, order) for x in (q, k, v)))
    assert_close(shuffled, shuffle(content_attention(q, k, v), order))


def test_positional_does_not_commute_with_shuffling(backend):
    q, _, v = maps(SHAPE, K, V)
    rel, order = table(SHAPE[1], K), torch.randperm(SHAPE[1] * SHAPE[2])
    shuffled = positional_attention(shuffle(q, order), shuffle(v, order), rel, "column")
    assert relative_error(shuffled, shuffle(positional_attention(q, v, rel, "column"), order)) > 0.1


def test_constant_in_the_keys_changes_nothing(backend):
    q, k, v = maps(SHAPE, K, V)
    constant = torch.randn(2, 1, 1, 2, K, dtype=torch.float64)  # any one for each head and channel
    assert_close(content_attention(q, k + constant, v), content_attention(q, k, v))


@pytest.mark.parametrize("axis", ["column", "row"])
def test_positional_commutes_with_translation(backend, axis):
    q, _, v = maps((1, 12, 12, 2), K, V)
    rel = table(12, K)
    reach, shift = 2, 3
    before = positional_attention(q, v, rel, axis, reach)
    after = positional_attention(q.roll((shift, shift), (1, 2)), v.roll((shift, shift), (1, 2)), rel, axis, reach)
    inner = slice(reach + shift, -reach)
    assert_close(after[:, inner, inner], before.roll((shift, shift), (1, 2))[:, inner, inner])


@pytest.mark.parametrize(("axis", "dim"), [("column", 1), ("row", 2)])
def test_smaller_map_equals_the_middle_of_the_table(backend, axis, dim):
    q, _, v = maps(SHAPE, K, V)
    length = SHAPE[dim]
    long = table(length + 4, K)
    assert_close(positional_attention(q, v, long, axis), positional_attention(q, v, long[4:-4], axis))
    assert long[4:-4].shape[0] == 2 * length - 1


@pytest.mark.parametrize("axis", ["column", "row"])
def test_larger_map_keeps_the_reach_of_the_table(backend, axis):
    q, _, v = maps(SHAPE, K, V)
    full = table(7, K)
    assert_close(positional_attention(q, v, full[4:-4], axis), positional_attention(q, v, full, axis, reach=2))


def test_reach_zero_sees_only_the_pixel_itself(backend):
    q, _, v = maps(SHAPE, K, V)
    rel = table(SHAPE[1], K)
    own = (q @ rel[SHAPE[1] - 1])[..., None] * v
    assert_close(positional_attention(q, v, rel, "column", reach=0), own)


def test_column_and_row_are_transposes(backend):
    q, _, v = maps(SHAPE, K, V)
    rel = table(SHAPE[1], K)
    row = positional_attention(q.transpose(1, 2), v.transpose(1, 2), rel, "row")
    assert_close(row.transpose(1, 2), positional_attention(q, v, rel, "column"))


def test_row_mixes_only_along_rows(backend):
    q, _, v = maps(SHAPE, K, V)
    rel = table(SHAPE[2], K)
    changed = v.clone()
    changed[:, 2] += 1
    difference = positional_attention(q, changed, rel, "row") - positional_attention(q, v, rel, "row")
    rows = difference.abs().amax(dim=(0, 2, 3, 4)) > 0
    assert rows.tolist() == [index == 2 for index in range(SHAPE[1])]


def test_heads_are_independent(backend):
    q, k, v = maps(SHAPE, K, V)
    tables = table(SHAPE[1], K), table(SHAPE[2], K)
    together = global_self_attention(q, k, v, *tables)
    for head in range(SHAPE[3]):
        alone = global_self_attention(*(x[:, :, :, head : head + 1] for x in (q, k, v)), *tables)
        assert_close(together[:, :, :, head : head + 1], alone)


@pytest.mark.parametrize("only", ["content", "column", "row"])
def test_one_component_alone(backend, only):
    """Without the others, the operation is that component, and the norm is not called."""
    q, k, v = maps(SHAPE, K, V)
    column, row = table(SHAPE[1], K), table(SHAPE[2], K)

    def norm(feature_map):
        raise AssertionError("there is nothing to normalise between")

    expected = {
        "content": lambda: content_attention(q, k, v),
        "column": lambda: positional_attention(q, v, column, "column"),
        "row": lambda: positional_attention(q, v, row, "row"),
    }[only]()
    given = {"content": k, "column": column, "row": row}
    k, column, row = (tensor if name == only else None for name, tensor in given.items())
    value = global_self_attention(q, k, v, column, row, norm)
    assert torch.equal(value, expected)


def test_components_add_up(backend):
    q, k, v = maps(SHAPE, K, V)
    tables = table(SHAPE[1], K), table(SHAPE[2], K)
    both = global_self_attention(q, k, v, *tables)
    assert_close(both, content_attention(q, k, v) + global_self_attention(q, None, v, *tables))


def test_empty_batch(backend):
    q, k, v = maps((0, 4, 3, 2), K, V)
    assert global_self_attention(q, k, v, table(4, K), table(3, K)).shape == (0, 4, 3, 2, V)
