"""Every attention module's row of Table 1, measured."""

import pytest
import torch

from gsanet import layers
from gsanet.layers import AxialAttention, CrissCrossAttention, GlobalSelfAttention, NonLocal
from gsanet.paper.properties import (
    commutes_with_shuffling,
    commutes_with_shuffling_lines,
    depends_on_content,
    depends_on_order,
    sees_everything,
    shift_error,
    small_module,
)

MODULES = [getattr(layers, name) for name in layers.__all__]


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_row_of_table_1(kind):
    module = small_module(kind)
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    assert sees_everything(module, x) == kind.properties.everywhere
    assert depends_on_content(module, x) == kind.properties.content
    assert commutes_with_shuffling(module, x) == (not kind.properties.positional)
    assert depends_on_order(module, x) == kind.properties.positional


def test_measurements_can_say_no():
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    convolution = torch.nn.Conv2d(16, 16, 3, padding=1).double()  # with a bias: affine, and still no content
    assert not sees_everything(convolution, x)
    assert not depends_on_content(convolution, x)
    assert not commutes_with_shuffling(convolution, x)
    assert depends_on_order(convolution, x)
    assert shift_error(convolution, x) < 1e-12
    options = {"feat_size": (9, 8), "num_heads": 2}
    positional = GlobalSelfAttention(16, **options, content=False).double().eval()
    assert not depends_on_content(positional, x)  # although each query is multiplied with what it gathers
    assert depends_on_order(positional, x)
    content = GlobalSelfAttention(16, **options, column=False, row=False).double().eval()
    assert sees_everything(content, x)
    assert commutes_with_shuffling(content, x)
    assert not depends_on_order(content, x)


def test_a_window_alone_is_not_position():
    """The mean of a window does not commute with shuffling, but within the window the order is nothing to it."""
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    mean = torch.nn.AvgPool2d(3, stride=1, padding=1)
    assert not commutes_with_shuffling(mean, x)
    assert not depends_on_order(mean, x)


def test_moves():
    x = torch.randn(1, 16, 21, 18, dtype=torch.float64)
    for kind, exact in {GlobalSelfAttention: True, NonLocal: True, AxialAttention: False}.items():
        error = shift_error(small_module(kind, feat_size=(21, 18)), x)
        assert (error < 1e-12) == exact
        assert error < 0.2

    class Placed(torch.nn.Module):
        def forward(self, x):
            return x * torch.arange(1, x.shape[-1] + 1)

    assert shift_error(Placed(), x) > 0.05


def test_criss_cross_attention_knows_only_who_shares_a_line():
    """The paper marks it as content only; it is, but for which pixels share a row or a column."""
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    module = small_module(CrissCrossAttention)
    assert commutes_with_shuffling_lines(module, x)
    assert not commutes_with_shuffling(module, x)
    once = CrissCrossAttention(16, recurrence=1).double()
    assert not sees_everything(once, x)
    assert not depends_on_order(once, x)  # among the pixels that it reaches at once, position is nothing to it
