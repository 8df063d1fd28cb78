"""Axial-DeepLab's attention against explicit loops, with batch norm of the batch's statistics."""

import torch
from helpers import assert_same_with_gradients
from torch.testing import assert_close

from gsanet.layers import PositionSensitiveAttention


def norm(vectors, layer):
    """Batch norm over all but the last dimension."""
    dims = tuple(range(vectors.dim() - 1))
    mean, variance = vectors.mean(dims), vectors.var(dims, unbiased=False)
    return (vectors - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def brute_line(line, rel, x):
    """Along dimension 1 of (batch, x, y, channel)."""
    length, heads = x.shape[1], line.num_heads
    projected = norm(x @ line.qkv.weight.flatten(1).T, line.norm_qkv).unflatten(-1, (heads, -1))
    width = projected.shape[-1] // 4
    q, k, v = projected.split((width, width, 2 * width), dim=-1)
    rel_q, rel_k, rel_v = rel.split((width, width, 2 * width), dim=1)
    middle = len(rel) // 2
    scores = torch.stack(
        [
            torch.stack(
                [
                    torch.stack(
                        [
                            (q[:, a] * k[:, b]).sum(-1),
                            (q[:, a] * rel_q[middle + b - a]).sum(-1),
                            (k[:, b] * rel_k[middle + b - a]).sum(-1),
                        ],
                        dim=2,
                    )
                    for b in range(length)
                ],
                dim=-1,
            )
            for a in range(length)
        ],
        dim=-2,
    )  # batch, y, part, head, a, b
    scores = norm(scores.permute(0, 1, 4, 5, 2, 3).flatten(4), line.norm_scores).unflatten(-1, (3, heads)).sum(-2)
    weights = scores.softmax(dim=3)  # batch, y, a, b, head
    content, position = [], []
    for a in range(length):
        content.append(sum(weights[:, :, a, b, :, None] * v[:, b] for b in range(length)))
        position.append(sum(weights[:, :, a, b, :, None] * rel_v[middle + b - a] for b in range(length)))
    parts = torch.stack((torch.stack(content, 1), torch.stack(position, 1)), dim=3)  # batch, a, y, part, head, v
    return norm(parts.flatten(3), line.norm_out).unflatten(-1, (2, -1)).sum(-2)


def test_against_loops():
    module = PositionSensitiveAttention(6, 8, feat_size=(4, 3), num_heads=2, dtype=torch.float64).train()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64, requires_grad=True)
    column = brute_line(module.column, module.rel_column, x.permute(0, 2, 3, 1))
    row = brute_line(module.row, module.rel_row, column.transpose(1, 2)).transpose(1, 2)
    assert_same_with_gradients(module(x), row.permute(0, 3, 1, 2), (x, *module.parameters()))


def test_output_is_normalised_already():
    """Networks put no batch norm behind it."""
    out = PositionSensitiveAttention(8, feat_size=(6, 5), num_heads=2).train()(torch.randn(4, 8, 6, 5))
    assert_close(out.mean((0, 2, 3)), torch.zeros(8), atol=1e-5, rtol=0)
    assert PositionSensitiveAttention.normalised
