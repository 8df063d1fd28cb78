"""Every attention module's row of Table 1, measured."""

import pytest
import torch

from gsanet.layers import (
    AttentionAugmentedConv,
    AxialAttention,
    GlobalSelfAttention,
    LocalRelation,
    PairwiseAttention,
    PatchwiseAttention,
    PositionSensitiveAttention,
    StandAloneAttention,
)
from gsanet.paper.properties import commutes_with_shuffling, depends_on_content, sees_everything

HEADS = {"num_heads": 2}
MODULES = {
    GlobalSelfAttention: HEADS,
    AxialAttention: HEADS,
    AttentionAugmentedConv: HEADS,
    LocalRelation: {},
    StandAloneAttention: HEADS,
    PairwiseAttention: {},
    PatchwiseAttention: {},
    PositionSensitiveAttention: HEADS,
}


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_row_of_table_1(kind):
    module = kind(16, feat_size=(9, 8), **MODULES[kind]).double().eval()
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
