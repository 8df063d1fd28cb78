"""The local relation layer against explicit loops."""

import pytest
import torch
from helpers import assert_same_with_gradients
from torch.testing import assert_close

from gsanet.layers import LocalRelation


def brute(module, x):
    batch, _, height, width = x.shape
    reach, stride = module.window // 2, module.stride
    q, k = (torch.einsum("bdxy,gd->bxyg", x, conv.weight.flatten(1)) for conv in (module.query, module.key))
    v = (
        x.permute(0, 2, 3, 1)
        if module.value is None
        else torch.einsum("bdxy,cd->bxyc", x, module.value.weight[..., 0, 0])
    )
    first, _, second = module.geometry
    rows = []
    for b in range(batch):
        for a in range(0, height, stride):
            for c in range(0, width, stride):
                scores, values = [], []
                for i in range(max(0, a - reach), min(height, a + reach + 1)):
                    for j in range(max(0, c - reach), min(width, c + reach + 1)):
                        offset = torch.tensor([i - a, j - c], dtype=x.dtype) / reach
                        prior = second.weight @ (first.weight @ offset + first.bias).relu()
                        scores.append(-((q[b, a, c] - k[b, i, j]) ** 2) + prior)
                        values.append(v[b, i, j])
                weights = torch.stack(scores).softmax(0).repeat_interleave(module.share, dim=1)  # neighbour, channel
                rows.append((weights * torch.stack(values)).sum(0))
    return torch.stack(rows).view(batch, -(-height // stride), -(-width // stride), -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("stride", "transform"), [(1, True), (2, True), (2, False)])
def test_against_loops(stride, transform):
    dim_out = 12 if transform else 8
    module = LocalRelation(8, dim_out, stride=stride, share=4, window=5, transform=transform, dtype=torch.float64)
    x = torch.randn(2, 8, 5, 6, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(module(x), brute(module, x), (x, *module.parameters()))


def test_large_queries_keep_their_precision_in_half():
    """2 q k - k^2 cancels where q and k are large and alike: it is formed in float32."""
    module = LocalRelation(8, share=4, window=3)
    with torch.no_grad():
        module.query.weight.fill_(4)
        module.key.weight.fill_(4)
    half = LocalRelation(8, share=4, window=3, dtype=torch.bfloat16)
    half.load_state_dict(module.state_dict())
    x = (torch.randint(0, 3, (1, 8, 6, 5)) / 4).bfloat16()
    assert_close(half(x).float(), module(x.float()), rtol=3e-2, atol=3e-2)
