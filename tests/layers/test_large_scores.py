"""Scores that 16 bits hold coarsely: compiled for a GPU, gradients are still those of the layer."""

import pytest
import torch
from fused_rounding import fused_rounding
from helpers import relative_error
from torch import Tensor, nn

from gsanet.functional.scores import add_scores
from gsanet.layers import AttentionAugmentedConv, AxialAttention, StandAloneAttention
from gsanet.layers.stand_alone_attention import AttentionStem

LAYERS = {
    "axial": lambda: AxialAttention(16, feat_size=16, num_heads=1),
    "stand-alone": lambda: StandAloneAttention(16, num_heads=1),
    "attention-augmented": lambda: AttentionAugmentedConv(16, feat_size=16, num_heads=1),
    "stem": lambda: AttentionStem(16, 16, num_heads=1),
}


@pytest.fixture(autouse=True)
def softmax_as_on_a_gpu(monkeypatch):
    """Autocast takes it in float32 there; on a CPU it leaves it in 16 bits."""
    usual = Tensor.softmax

    def softmax(x, dim, dtype=None):
        return usual(x, dim, dtype=torch.promote_types(x.dtype, torch.float32))

    monkeypatch.setattr(Tensor, "softmax", softmax)
    torch._dynamo.reset()


def gradients(function, layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = function(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_gradients(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for parameter in layer.parameters():
        parameter.data *= 15  # a score is a product of two
    x = torch.randn(2, 16, 16, 16)
    usual = gradients(layer, layer, x)
    compiled = gradients(torch.compile(layer, backend=fused_rounding), layer, x)
    for found, expected in zip(compiled, usual, strict=True):
        assert relative_error(found, expected) < 0.05


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_the_sum_is_wide_and_unrounded(dtype, expected):
    parts = [torch.tensor([value], dtype=dtype) for value in (1024.0, 0.5, 0.25)]
    total = add_scores(*parts)
    assert total.dtype == expected
    assert total.item() == 1024.75
