"""Stand-alone self-attention against explicit loops, and against the mistake that several ports make."""

import pytest
import torch
from helpers import assert_same_with_gradients
from torch.testing import assert_close

from gsanet.layers import StandAloneAttention
from gsanet.layers.stand_alone_attention import AttentionStem


def brute(module, x):
    """Pixel by pixel, head by head, neighbour by neighbour."""
    batch, _, height, width = x.shape
    heads, reach = module.num_heads, module.window // 2
    q, k, v = (
        torch.einsum("bdxy,cd->bxyc", x, w).unflatten(-1, (heads, -1)) for w in module.qkv.weight.flatten(1).chunk(3)
    )
    rows = []
    for b in range(batch):
        for a in range(height):
            for c in range(width):
                pixel = []
                for n in range(heads):
                    scores, values = [], []
                    for i in range(max(0, a - reach), min(height, a + reach + 1)):
                        for j in range(max(0, c - reach), min(width, c + reach + 1)):
                            r = torch.cat((module.rel_x[i - a + reach], module.rel_y[j - c + reach]))
                            scores.append(q[b, a, c, n].dot(k[b, i, j, n]) + q[b, a, c, n].dot(r))
                            values.append(v[b, i, j, n])
                    pixel.append(torch.stack(scores).softmax(0) @ torch.stack(values))
                rows.append(torch.cat(pixel))
    return torch.stack(rows).unflatten(0, (batch, height, width)).permute(0, 3, 1, 2)


def test_against_loops():
    module = StandAloneAttention(6, 8, num_heads=2, window=3, dtype=torch.float64)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(module(x), brute(module, x), (x, *module.parameters()))


def elementwise_port(module, x):
    """The mistake: q * k is never summed over the channels, and every channel has a softmax of its own."""
    reach, window = module.window // 2, module.window
    q, k, v = (torch.einsum("bdxy,cd->bcxy", x, w) for w in module.qkv.weight.flatten(1).chunk(3))
    k, v = (torch.nn.functional.pad(t, (reach,) * 4).unfold(2, window, 1).unfold(3, window, 1) for t in (k, v))
    weights = (q[..., None, None] * k).flatten(4).softmax(-1)
    return (weights * v.flatten(4)).sum(-1)


def test_scores_are_sums_over_channels():
    """Turning q and k of each head by the same rotation changes no product of the two, so it changes nothing.

    Ports that multiply q and k elementwise and forget the sum fail this: it is shown to catch one.
    """
    module = StandAloneAttention(8, num_heads=2, window=3, dtype=torch.float64)
    turned = StandAloneAttention(8, num_heads=2, window=3, dtype=torch.float64)
    for parameter in (module.rel_x, module.rel_y, turned.rel_x, turned.rel_y):
        torch.nn.init.zeros_(parameter)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    with torch.no_grad():
        q, k, v = module.qkv.weight.flatten(1).chunk(3)
        q, k = (torch.einsum("ij,njd->nid", rotation, w.unflatten(0, (2, 4))).flatten(0, 1) for w in (q, k))
        turned.qkv.weight.copy_(torch.cat((q, k, v))[..., None, None])
    x = torch.randn(1, 8, 5, 4, dtype=torch.float64)
    assert_close(turned(x), module(x))
    wrong, wrong_turned = elementwise_port(module, x), elementwise_port(turned, x)
    assert not torch.allclose(wrong_turned, wrong, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(wrong, module(x), rtol=1e-3, atol=1e-3)


def test_one_weight_for_each_head_and_neighbour():
    """With the values of a head all alike, its output is that value, whatever the scores."""
    module = StandAloneAttention(8, num_heads=2, window=3, dtype=torch.float64)
    with torch.no_grad():
        module.qkv.weight[16:] = 0
        module.qkv.weight[16:, 0] = 1
    x = torch.randn(1, 8, 5, 4, dtype=torch.float64)
    x[:, 0] = 3.0
    assert_close(module(x), torch.full((1, 8, 5, 4), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("size", [(8, 4), (6, 9)])
def test_stem_against_loops(size):
    module = AttentionStem(3, 8, num_heads=2, mixture=3, dtype=torch.float64).train()
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    weights = module.qkv.weight.flatten(1).unflatten(0, (5, 2, 4))  # q, k, three values; head; channel
    mix = ((module.place_x[:, None] + module.place_y) @ module.mixer.T).softmax(-1)  # a, b, m
    pixels = []
    for b in range(2):
        for i in range(size[0]):
            for j in range(size[1]):
                top, left = i // 4 * 4, j // 4 * 4
                for n in range(2):
                    q = weights[0, n] @ x[b, :, i, j]
                    scores, values = [], []
                    for u in range(top, min(top + 4, size[0])):
                        for w in range(left, min(left + 4, size[1])):
                            r = torch.cat((module.rel_x[u - i + 3], module.rel_y[w - j + 3]))
                            scores.append(q.dot(weights[1, n] @ x[b, :, u, w] + r))
                            matrix = sum(mix[u - top, w - left, m] * weights[2 + m, n] for m in range(3))
                            values.append(matrix @ x[b, :, u, w])
                    pixels.append(torch.stack(scores).softmax(0) @ torch.stack(values))
    attended = torch.stack(pixels).view(2, *size, 8).permute(0, 3, 1, 2)
    mean, variance = attended.mean((0, 2, 3), keepdim=True), attended.var((0, 2, 3), unbiased=False, keepdim=True)
    normalised = (attended - mean) / (variance + 1e-5).sqrt()
    expected = torch.stack(
        [
            torch.stack([normalised[:, :, a : a + 4, c : c + 4].amax((2, 3)) for c in range(0, size[1], 4)], dim=-1)
            for a in range(0, size[0], 4)
        ],
        dim=2,
    )
    inputs = (x, *(p for p in module.parameters() if p is not module.norm.weight and p is not module.norm.bias))
    assert_same_with_gradients(module(x), expected, inputs)
    module(x).pow(3).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


def test_stem_is_local_to_blocks():
    stem = AttentionStem().eval()
    x = torch.randn(1, 3, 12, 8, requires_grad=True)
    out = stem(x)
    assert out.shape == (1, 64, 3, 2)
    (grad,) = torch.autograd.grad(out[0, :, 1, 0].sum(), x)
    seen = grad[0].abs().sum(0) > 0
    assert seen[4:8, :4].all()
    assert seen.sum() == 16
