"""Table 2's axial alternative, against explicit loops."""

import copy

import pytest
import torch
from helpers import relative_error
from torch.testing import assert_close

from gsanet.layers import AxialAttention
from gsanet.layers.axial_attention import axial_attention


def brute(q, k, v, rel):
    batch, height, width, heads, channels = q.shape
    out = torch.zeros_like(v)
    for b in range(batch):
        for x in range(height):
            for y in range(width):
                for n in range(heads):
                    scores = torch.stack(
                        [
                            (q[b, x, y, n] * (k[b, i, y, n] + rel[rel.shape[0] // 2 + i - x])).sum() / channels**0.5
                            for i in range(height)
                        ]
                    )
                    out[b, x, y, n] = (scores.softmax(0)[:, None] * v[b, :, y, n]).sum(0)
    return out


def test_against_loops():
    q, k = torch.randn(2, 2, 4, 3, 2, 5, dtype=torch.float64)
    v = torch.randn(2, 4, 3, 2, 6, dtype=torch.float64)
    rel = torch.randn(7, 5, dtype=torch.float64)
    assert_close(axial_attention(q, k, v, rel), brute(q, k, v, rel))


def test_module_is_column_norm_row():
    module = AxialAttention(8, 12, feat_size=(4, 5), num_heads=2, dtype=torch.float64).eval()
    x = torch.randn(2, 8, 4, 5, dtype=torch.float64)
    q, k, v = (
        torch.einsum("bdxy,cd->bxyc", x, w).unflatten(-1, (2, -1))
        for w in module.qkv.weight.flatten(1).split((8, 8, 12))
    )
    column = brute(q, k, v, module.rel_column) / (1 + 1e-5) ** 0.5  # batch norm as it starts, in eval mode
    row = brute(q.transpose(1, 2), k.transpose(1, 2), column.transpose(1, 2), module.rel_row).transpose(1, 2)
    assert_close(module(x), row.flatten(3).permute(0, 3, 1, 2))


def test_sizes_gradients_and_half_precision():
    module = AxialAttention(16, feat_size=(8, 6), num_heads=4, stride=2)
    x = torch.randn(2, 16, 8, 6)
    out = module(x)
    assert out.shape == (2, 16, 4, 3)
    out.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())
    assert module(x[..., :5, :3]).shape == (2, 16, 3, 2)
    with pytest.raises(ValueError, match="larger than the 8x6"):
        module(torch.randn(1, 16, 9, 6))
    module.resize_tables((9, 6))
    assert module(torch.randn(1, 16, 9, 6)).shape == (1, 16, 5, 3)
    module.eval()
    half = copy.deepcopy(module).bfloat16()
    assert relative_error(half(x.bfloat16()), module(x)) < 3e-2


def test_compile():
    torch._dynamo.reset()
    module = AxialAttention(16, feat_size=(4, 4), num_heads=2).eval()
    x = torch.randn(2, 16, 4, 4)
    assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


def test_bad_heads():
    with pytest.raises(ValueError, match="dim must be divisible by the number of heads, got 12 for 8 heads"):
        AxialAttention(12, feat_size=4)
