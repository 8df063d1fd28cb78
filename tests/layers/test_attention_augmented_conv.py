"""The attention-augmented convolution against explicit loops."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_with_gradients

from gsanet.layers import AttentionAugmentedConv


def brute_attention(module, x):
    batch, _, height, width = x.shape
    widths = (module.dim_key, module.dim_key, module.dim_value)
    q, k, v = (
        torch.einsum("bdxy,cd->bxyc", x, w).unflatten(-1, (module.num_heads, -1))
        for w in module.qkv.weight.flatten(1).split(widths)
    )
    column, row = module.rel_column, module.rel_row
    pixels = [(i, j) for i in range(height) for j in range(width)]
    rows = []
    for b in range(batch):
        for a, c in pixels:
            heads = []
            for n in range(module.num_heads):
                query = q[b, a, c, n]
                scores = [
                    query.dot(k[b, i, j, n] + column[len(column) // 2 + i - a] + row[len(row) // 2 + j - c])
                    for i, j in pixels
                ]
                weights = (torch.stack(scores) / len(query) ** 0.5).softmax(0)
                heads.append(weights @ torch.stack([v[b, i, j, n] for i, j in pixels]))
            rows.append(module.proj.weight.flatten(1) @ torch.cat(heads))
    return torch.stack(rows).view(batch, height, width, -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("stride", "downsample"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_against_loops(stride, downsample):
    module = AttentionAugmentedConv(
        6, 20, (8, 5), stride, num_heads=2, value_ratio=0.3, downsample=downsample, dtype=torch.float64
    )
    x = torch.randn(2, 6, 8, 5, dtype=torch.float64, requires_grad=True)
    convolved = F.conv2d(x, module.conv.weight, stride=stride, padding=1)
    pooled = x
    for _ in range((stride * downsample).bit_length() - 1):
        counted = F.avg_pool2d(torch.ones_like(pooled[:1, :1]), 3, 2, 1)  # what share of a window is on the map
        pooled = F.avg_pool2d(pooled, 3, 2, 1) / counted
    attended = brute_attention(module, pooled)
    if downsample > 1:
        attended = F.interpolate(attended, size=convolved.shape[-2:], mode="bilinear")
    out, expected = module(x), torch.cat((convolved, attended), dim=1)
    assert out.shape == (2, 20, -(-8 // stride), -(-5 // stride))
    assert_same_with_gradients(out, expected, (x, *module.parameters()))


def test_channels_of_the_papers_networks():
    """The fractions 0.2 and 0.1 of the last three groups, and 20 channels of keys a head."""
    for dim, value in ((128, 16), (256, 24), (512, 48)):
        module = AttentionAugmentedConv(dim, feat_size=4)
        assert (module.dim_key, module.dim_value, module.conv.out_channels) == (160, value, dim - value)
        assert module.rel_column.shape == (7, 20)
    assert AttentionAugmentedConv(1024, feat_size=4).dim_key == 8 * 26


def test_tables_follow_the_map_that_is_attended_over():
    module = AttentionAugmentedConv(16, feat_size=(9, 12), num_heads=2, stride=2, downsample=2)
    assert (len(module.rel_column), len(module.rel_row)) == (5, 5)
    assert module(torch.randn(1, 16, 9, 12)).shape == (1, 16, 5, 6)
    assert module(torch.randn(1, 16, 10, 12)).shape == (1, 16, 5, 6)  # still three pixels high inside
    with pytest.raises(ValueError, match=r"a map of 13x12 is larger than the 9x12.*resize_tables\(\(13, 12\)\)"):
        module(torch.randn(1, 16, 13, 12))
    module.resize_tables((13, 12))
    assert module(torch.randn(1, 16, 13, 12)).shape == (1, 16, 7, 6)
