"""Every attention module's row of Table 1, measured."""

import pytest
import torch

from gsanet import layers
from gsanet.layers import CrissCrossAttention, GlobalSelfAttention
from gsanet.paper.properties import commutes_with_shuffling, depends_on_content, sees_everything, small_module

MODULES = [getattr(layers, name) for name in layers.__all__]


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_row_of_table_1(kind):
    module = small_module(kind)
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    assert sees_everything(module, x) == kind.properties.everywhere
    assert depends_on_content(module, x) == kind.properties.content
    assert commutes_with_shuffling(module, x) == (not kind.properties.positional)


def test_measurements_can_say_no():
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    convolution = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False).double()
    assert not sees_everything(convolution, x)
    assert not depends_on_content(convolution, x)
    assert not commutes_with_shuffling(convolution, x)
    content = GlobalSelfAttention(16, feat_size=(9, 8), num_heads=2, column=False, row=False).double().eval()
    assert sees_everything(content, x)
    assert commutes_with_shuffling(content, x)


def test_criss_cross_attention_knows_only_who_shares_a_line():
    """The paper marks it as content only; it is, but for which pixels share a row or a column."""
    x = torch.randn(1, 16, 9, 8, dtype=torch.float64)
    module = small_module(CrissCrossAttention)
    rows, columns = torch.randperm(9), torch.randperm(8)
    with torch.no_grad():
        torch.testing.assert_close(module(x[:, :, rows][..., columns]), module(x)[:, :, rows][..., columns])
        assert not commutes_with_shuffling(module, x)
    assert not sees_everything(CrissCrossAttention(16, recurrence=1).double(), x)
