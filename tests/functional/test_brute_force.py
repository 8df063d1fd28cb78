"""Both backends against explicit loops over pixels, heads and offsets, in float64: output and every gradient."""

import pytest
import torch
from helpers import brute_content, brute_global, brute_positional, gradients, maps, relative_error, table
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gsanet.functional import content_attention, global_self_attention, positional_attention, use_backend

ROUNDING = 1e-12
shapes = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
widths = st.integers(1, 3)
reaches = st.one_of(st.none(), st.integers(0, 6))
both = pytest.mark.parametrize("backend", ["reference", "torch"])


def assert_same(function, brute, inputs):
    expected, value = brute(*inputs), function(*inputs)
    assert value.shape == expected.shape
    assert relative_error(value, expected) < ROUNDING
    for name, got, want in zip("0123456", gradients(value, inputs), gradients(expected, inputs), strict=False):
        assert relative_error(got, want) < ROUNDING or (got - want).abs().max() < ROUNDING, f"gradient {name}"


@both
@settings(max_examples=20)
@given(shape=shapes, k=widths, v=widths, seed=st.integers(0, 99))
@example(shape=(2, 3, 1, 1), k=3, v=1, seed=0)  # one pixel wide, one head, k != v
def test_content(backend, shape, k, v, seed):
    torch.manual_seed(seed)
    with use_backend(backend):
        assert_same(content_attention, brute_content, maps(shape, k, v, grad=True))


@both
@pytest.mark.parametrize("axis", ["column", "row"])
@settings(max_examples=20)
@given(shape=shapes, k=widths, v=widths, length=st.integers(1, 5), reach=reaches, seed=st.integers(0, 99))
@example(shape=(1, 4, 3, 2), k=2, v=3, length=4, reach=0, seed=0)
@example(shape=(1, 4, 3, 2), k=2, v=3, length=4, reach=9, seed=0)  # beyond the map
@example(shape=(1, 1, 4, 1), k=1, v=2, length=4, reach=None, seed=0)  # one pixel high
@example(shape=(1, 4, 4, 1), k=2, v=2, length=2, reach=None, seed=0)  # the map is larger than the table
@example(shape=(1, 2, 2, 1), k=2, v=2, length=5, reach=1, seed=0)  # and smaller
def test_positional(backend, axis, shape, k, v, length, reach, seed):
    torch.manual_seed(seed)
    q, _, values = maps(shape, k, v, grad=True)
    inputs = (q, values, table(length, k, grad=True))
    with use_backend(backend):
        assert_same(
            lambda *tensors: positional_attention(*tensors, axis, reach),
            lambda *tensors: brute_positional(*tensors, axis, reach),
            inputs,
        )


@both
@settings(max_examples=15)
@given(shape=shapes, k=widths, v=widths, reach=reaches, seed=st.integers(0, 99))
def test_global(backend, shape, k, v, reach, seed):
    torch.manual_seed(seed)
    tables = (table(shape[1], k, grad=True), table(shape[2], k, grad=True))
    scale = torch.rand(shape[3] * v, 1, 1, dtype=torch.float64) + 0.5

    def norm(feature_map):  # distinguishes channels and heads, unlike a plain factor
        return feature_map * scale

    inputs = (*maps(shape, k, v, grad=True), *tables)
    with use_backend(backend):
        assert_same(
            lambda *tensors: global_self_attention(*tensors, norm, reach),
            lambda *tensors: brute_global(*tensors, norm, reach),
            inputs,
        )


@both
def test_gradcheck(backend):
    """Also against numerical derivatives, and the second ones: the lean backend has a backward of its own."""
    inputs = (*maps((1, 3, 2, 2), 2, 3, grad=True), table(3, 2, grad=True), table(2, 2, grad=True))
    with use_backend(backend):
        assert torch.autograd.gradcheck(global_self_attention, inputs)
        assert torch.autograd.gradgradcheck(global_self_attention, inputs)
