"""Choosing a backend, and refusing bad input with one clear sentence."""

import numpy as np
import pytest
import torch
from helpers import maps, table

from gsanet.functional import (
    content_attention,
    explain_backend,
    global_self_attention,
    global_self_attention_map,
    positional_attention,
    use_backend,
)
from gsanet.functional.backends import BACKENDS, Backend


def test_default_and_preference():
    q, k, v = maps((1, 3, 3, 1), 2, 2)
    assert explain_backend("content_attention", q, k, v).startswith("torch")
    with use_backend("reference"):
        assert explain_backend("content_attention", q, k, v) == "reference: asked for by use_backend"
        with use_backend("torch"):
            assert explain_backend("content_attention", q, k, v).startswith("torch")
        assert explain_backend("content_attention", q, k, v).startswith("reference")
    assert explain_backend("content_attention", q, k, v).startswith("torch")


def test_preference_ends_with_an_error():
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert explain_backend("content_attention", *maps((1, 2, 2, 1), 1, 1)).startswith("torch")


def test_what_a_backend_refuses_goes_to_the_next(monkeypatch):
    calls = []

    def only_float32(operation, *tensors):
        return None if tensors[0].dtype == torch.float32 else f"{tensors[0].dtype} is not supported"

    def content(q, k, v):
        calls.append("picky")
        return v

    picky = Backend("picky", content, BACKENDS["torch"].positional_attention, only_float32)
    before = dict(BACKENDS)
    monkeypatch.setattr("gsanet.functional.backends.BACKENDS", {"picky": picky, **before})
    q, k, v = maps((1, 3, 3, 1), 2, 2)
    single = [tensor.float() for tensor in (q, k, v)]
    content_attention(q, k, v)
    assert not calls
    content_attention(*single)
    assert calls == ["picky"]
    assert explain_backend("content_attention", q, k, v) == (
        "torch: picky refuses: torch.float64 is not supported; fused refuses: it runs on NVIDIA GPUs, not on cpu; "
        "native refuses: its kernels take float32 and bfloat16, not torch.float64"
    )
    assert explain_backend("content_attention", *single).startswith("picky: the first choice")
    with use_backend("picky"):
        assert "picky refuses" in explain_backend("content_attention", q, k, v)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"unknown backend 'cudnn'.*'torch', 'reference'"), use_backend("cudnn"):
        pass


Q, K, V = maps((1, 4, 3, 2), 2, 5)
REL = table(4, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: content_attention(Q[0], K, V), ValueError, "q must have the five dimensions"),
        (lambda: content_attention(Q, K[..., :1], V), ValueError, "k must have q's shape"),
        (lambda: content_attention(Q, K, V[:, :2]), ValueError, "v must agree with q"),
        (lambda: content_attention(Q, K, V.float()), TypeError, "same dtype.*v torch.float32"),
        (lambda: content_attention(Q, K.to("meta"), V), TypeError, "same device, got q cpu, k meta, v cpu"),
        (lambda: content_attention(Q.long(), K, V), TypeError, "q must hold floating-point"),
        (lambda: content_attention(Q, [1], V), TypeError, "k must be a tensor, got list"),
        (lambda: positional_attention(Q, V, REL, "diagonal"), ValueError, "'column' or 'row', got 'diagonal'"),
        (lambda: positional_attention(Q, V, REL, "row", reach=-1), ValueError, "reach must be 0 or more.*got -1"),
        (lambda: positional_attention(Q, V, REL, "row", reach=1.5), TypeError, "whole number of pixels.*1.5"),
        (lambda: positional_attention(Q, V, REL, "row", reach=True), TypeError, "whole number of pixels.*True"),
        (lambda: positional_attention(Q, V, REL, "row", np.float64(1)), TypeError, "whole number of pixels.*1.0"),
        (lambda: positional_attention(Q, V, REL[1:], "row"), ValueError, r"odd number of rows.*got \(6, 2\)"),
        (lambda: positional_attention(Q, V, REL[:, :1], "row"), ValueError, r"shape \(2 \* length - 1, 2\)"),
        (lambda: positional_attention(Q, V, 3, "row"), TypeError, "rel must be a tensor, got int"),
        (lambda: global_self_attention(Q, None, V, None, None), ValueError, "at least one"),
        (
            lambda: positional_attention(Q[:, :0], V[:, :0], REL, "column"),
            ValueError,
            r"one pixel, got \(1, 0, 3, 2, 2\)",
        ),
        (
            lambda: content_attention(Q[:, :, :0], K[:, :, :0], V[:, :, :0]),
            ValueError,
            "q must have at least one pixel",
        ),
        (
            lambda: explain_backend("convolution", Q, K, V),
            ValueError,
            "unknown operation 'convolution': one of 'content_",
        ),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("whole", [np.int64, np.uint8, torch.tensor])
def test_whole_numbers_of_any_type(whole):
    numbers = {"num_heads": 2, "dim_key": 8, "reach": 1, "stride": 2}
    inputs = torch.randn(2, 8, 4, 5), torch.randn(20, 8), torch.randn(7, 4), torch.randn(9, 4)
    expected = global_self_attention_map(*inputs, **numbers)
    found = global_self_attention_map(*inputs, **{name: whole(number) for name, number in numbers.items()})
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_heads": 3}, ValueError, "dim_key must be divisible by the number of heads, got 8 for 3"),
        ({"num_heads": 0}, ValueError, "num_heads must be 1 or more, got 0"),
        ({"num_heads": 2.0}, TypeError, r"num_heads must be a whole number, got 2\.0"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number, got True"),
        ({"dim_key": 10}, ValueError, r"more than 20 rows for dim_key 10, got \(20, 8\)"),
        ({"weight": torch.zeros(19, 8)}, ValueError, "dim_out must be divisible by the number of heads, got 3 for 2"),
        ({"weight": torch.zeros(8)}, ValueError, r"weight must have shape \(2 \* dim_key \+ dim_out, channels\)"),
        ({"weight": [1.0]}, TypeError, "weight must be a tensor, got list"),
        ({"weight": torch.zeros(20, 8).double()}, TypeError, "same dtype.*x torch.float32, weight torch.float64"),
        ({"stride": 0}, ValueError, "stride must be 1 or more, got 0"),  # was taken for 1
        ({"stride": -2}, ValueError, "stride must be 1 or more, got -2"),
        ({"x": torch.zeros(2, 8, 0, 5)}, ValueError, r"at least one pixel, got \(2, 8, 0, 5\)"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_whole_module(changes, error, words):
    arguments = {"x": torch.zeros(2, 8, 4, 5), "weight": torch.zeros(20, 8), "num_heads": 2, "dim_key": 8}
    tables = {"rel_column": torch.zeros(7, 4), "rel_row": torch.zeros(9, 4)}
    assert global_self_attention_map(**arguments, **tables).shape == (2, 4, 4, 5)
    with pytest.raises(error, match=words) as caught:
        global_self_attention_map(**{**arguments, **tables, **changes})
    assert "\n" not in str(caught.value)
