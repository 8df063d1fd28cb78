"""The modules inserted between residual blocks or added at the end, each against its paper's equation, spelt out."""

import copy
import math

import pytest
import torch
from helpers import gradients, relative_error
from torch.testing import assert_close

from gsanet.functional import content_attention
from gsanet.layers import (
    CompactNonLocal,
    CrissCrossAttention,
    DETRTransformer,
    DoubleAttention,
    EfficientAttention,
    NonLocal,
    VideoTransformer,
)
from gsanet.layers.criss_cross import CrissCrossHead
from gsanet.layers.detr_transformer import sine_positions
from gsanet.paper.properties import small_module

INSERTED = [NonLocal, DoubleAttention, CompactNonLocal, EfficientAttention]
KINDS = [*INSERTED, CrissCrossAttention, CrissCrossHead, DETRTransformer, VideoTransformer]


def softmax(scores):
    """Over a list of numbers."""
    exponentials = (torch.stack(scores) - max(scores).detach()).exp()
    return exponentials / exponentials.sum()


def affine(layer, vector):
    weight = layer.weight.flatten(1)
    return weight @ vector + (0 if layer.bias is None else layer.bias)


def pixels_of(x):
    """The vectors of each image's pixels, row by row."""
    return [[image[:, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])] for image in x]


def to_map(images, like):
    return torch.stack([torch.stack(pixels, dim=1) for pixels in images]).unflatten(2, like.shape[2:])


def brute_non_local(module, x):
    block, images = module.block, []
    for pixels in pixels_of(x):
        theta, phi, g = ([affine(layer, p) for p in pixels] for layer in (block.t, block.p, block.g))
        out = []
        for t in theta:
            weights = softmax([t @ p / module.dim**0.5 for p in phi])
            out.append(affine(block.z, sum(w * v for w, v in zip(weights, g, strict=True))))
        images.append(out)
    return x + block.norm(to_map(images, x))


def brute_double_attention(module, x):
    images = []
    for pixels in pixels_of(x):
        phi, theta, rho = zip(*(affine(module.project, p).chunk(3) for p in pixels), strict=True)
        gathered = []
        for n in range(module.dim_inner):
            attention_map = softmax([t[n] for t in theta])
            gathered.append(sum(a * f for a, f in zip(attention_map, phi, strict=True)))
        out = []
        for r in rho:
            shares = softmax(list(r))
            out.append(affine(module.expand, sum(s * vector for s, vector in zip(shares, gathered, strict=True))))
        images.append(out)
    return x + module.norm(to_map(images, x))


def brute_compact_non_local(module, x):
    """All (pixel, channel) pairs of a group against all others, as the uncompacted equation has it."""
    theta, phi, g = module.project(x).chunk(3, dim=1)
    images = []
    for t, p, v in zip(theta, phi, g, strict=True):
        groups = []
        for t_group, p_group, v_group in zip(*(m.chunk(module.num_groups) for m in (t, p, v)), strict=True):
            pairs = t_group.reshape(-1, 1) * p_group.reshape(1, -1)
            groups.append((pairs @ v_group.reshape(-1)).view_as(t_group))
        images.append(torch.cat(groups))
    return x + module.norm(module.expand(torch.stack(images)))


def brute_efficient_attention(module, x):
    """Every pixel's attention over every other one, which the module never forms."""
    images = []
    for pixels in pixels_of(x):
        q, k, v = (torch.stack(m) for m in zip(*(affine(module.qkv, p).chunk(3) for p in pixels), strict=True))
        heads = []
        for qh, kh, vh in zip(*(m.chunk(module.num_heads, dim=1) for m in (q, k, v)), strict=True):
            attention = qh.exp() / qh.exp().sum(1, keepdim=True) @ (kh.exp() / kh.exp().sum(0, keepdim=True)).T
            heads.append(attention @ vh)
        images.append([affine(module.project, p) for p in torch.cat(heads, dim=1)])
    return x + to_map(images, x)


def brute_criss_cross(module, x):
    height, width = x.shape[2:]
    for _ in range(module.recurrence):
        images = []
        for image in x:
            qkv = {(i, j): affine(module.qkv, image[:, i, j]) for i in range(height) for j in range(width)}
            q, k, v = (
                {at: m.split((module.dim_key, module.dim_key, module.dim))[n] for at, m in qkv.items()}
                for n in range(3)
            )
            out = []
            for i, j in qkv:
                cross = [at for at in qkv if at[0] == i or at[1] == j]
                assert len(cross) == height + width - 1
                weights = softmax([q[i, j] @ k[at] for at in cross])
                out.append(image[:, i, j] + sum(w * v[at] for w, at in zip(weights, cross, strict=True)))
            images.append(out)
        x = to_map(images, x)
    return x


def brute_criss_cross_head(module, x):
    attended = brute_criss_cross(module.attention, module.reduce(x))
    return module.fuse(torch.cat([x, module.refine(attended)], dim=1))


def layer_norm(norm, x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (((x - mean) ** 2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def multi_head(attention, queries, keys, values):
    """Tokens (n, dim), head by head."""
    (wq, wk, wv), (bq, bk, bv) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    heads = []
    for part in torch.arange(len(wq)).chunk(attention.num_heads):
        q, k, v = queries @ wq[part].T + bq[part], keys @ wk[part].T + bk[part], values @ wv[part].T + bv[part]
        heads.append((q @ k.T / len(part) ** 0.5).softmax(-1) @ v)
    return torch.cat(heads, dim=1) @ attention.out_proj.weight.T + attention.out_proj.bias


def brute_positions(height, width, channels):
    out = torch.empty(height, width, channels, dtype=torch.float64)
    quarter = channels // 4
    for i in range(height):
        for j in range(width):
            for c in range(channels):
                place, length = (i, height) if c < 2 * quarter else (j, width)
                pair, second = divmod(c % (2 * quarter), 2)
                angle = 2 * math.pi * (place + 1) / length / 10000 ** (pair / quarter)
                out[i, j, c] = math.cos(angle) if second else math.sin(angle)
    return out.flatten(0, 1)


def brute_detr(module, x):
    positions = brute_positions(*x.shape[2:], module.dim_out)
    images = []
    for pixels in pixels_of(x):
        tokens = torch.stack([affine(module.project, p) for p in pixels])
        for layer in module.layers:
            attended = multi_head(layer.attention, tokens + positions, tokens + positions, tokens)
            tokens = layer_norm(layer.norm1, tokens + attended)
            first, second = layer.feedforward[0], layer.feedforward[3]
            inner = (tokens @ first.weight.T + first.bias).clamp(min=0)
            tokens = layer_norm(layer.norm2, tokens + inner @ second.weight.T + second.bias)
        images.append(list(tokens))
    return to_map(images, x)


def brute_video(module, x):
    images = []
    for pixels in pixels_of(x):
        tokens = torch.stack([module.class_token, *(affine(module.project, p) for p in pixels)])
        tokens = layer_norm(module.norm, tokens + module.positions[: len(tokens)])
        for layer in module.encoder.layers:
            tokens = layer_norm(layer.norm1, tokens + multi_head(layer.self_attn, tokens, tokens, tokens))
            inner = tokens @ layer.linear1.weight.T + layer.linear1.bias
            inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
            tokens = layer_norm(layer.norm2, tokens + inner @ layer.linear2.weight.T + layer.linear2.bias)
        images.append(list(tokens[1:]))
    return to_map(images, x)


BRUTE = {
    NonLocal: brute_non_local,
    DoubleAttention: brute_double_attention,
    CompactNonLocal: brute_compact_non_local,
    EfficientAttention: brute_efficient_attention,
    CrissCrossAttention: brute_criss_cross,
    CrissCrossHead: brute_criss_cross_head,
    DETRTransformer: brute_detr,
    VideoTransformer: brute_video,
}


def shaken(kind):
    """A small module with no parameter at a special value: biases and normalisations matter too."""
    module = small_module(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", [(3, 4), (5, 2), (1, 3)])
def test_against_the_equation(kind, size):
    module = shaken(kind)
    x = torch.randn(2, 16, *size, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    ours, theirs = module(x), BRUTE[kind](module, x)
    assert ours.shape == theirs.shape == x.shape
    assert relative_error(ours, theirs) < 1e-10
    for mine, brute in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert_close(mine, brute, rtol=1e-10, atol=1e-10 * max(1, brute.abs().max().item()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_parameter_receives_a_gradient(kind):
    module = shaken(kind).train()
    module(torch.randn(2, 16, 3, 4, dtype=torch.float64)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().sum() > 1e-9, name  # not just rounding errors


@pytest.mark.parametrize("kind", INSERTED, ids=lambda kind: kind.__name__)
def test_starts_as_the_identity(kind):
    x = torch.randn(2, 16, 3, 5)
    for mode in (True, False):
        assert_close(kind(16).train(mode)(x), x)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kind, dtype):
    module = small_module(kind, dim=64)
    x = torch.randn(2, 64, 7, 6, dtype=torch.float64)
    half = copy.deepcopy(module).to(dtype)
    out = half(x.to(dtype))
    assert out.dtype == dtype
    assert relative_error(out, module(x)) < (1e-2 if dtype == torch.float16 else 6e-2)
    half.train()(x.to(dtype)).float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())
    with torch.autocast("cpu", dtype):
        assert copy.deepcopy(module).float()(x.float()).isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_compile(kind):
    torch._dynamo.reset()
    module = small_module(kind).float()
    x = torch.randn(2, 16, 4, 5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), module(x))
    with torch.no_grad():
        assert_close(compiled(x), module(x))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_channels_last_is_the_same(kind):
    module = small_module(kind)
    x = torch.randn(2, 16, 4, 5, dtype=torch.float64)
    out = module(x.to(memory_format=torch.channels_last))
    assert_close(out, module(x))
    if kind is not VideoTransformer:  # which leaves its class token out
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_gathered_shares_add_up_to_one():
    """The same vector gathered everywhere comes back as it is: shares from a softmax over pixels would change it."""
    module = shaken(DoubleAttention)
    x = torch.randn(1, 16, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        module.project.weight[: module.dim_inner] = 0  # phi is its bias at every pixel
        same = affine(module.expand, module.project.bias[: module.dim_inner])
        assert_close(module(x), x + module.norm(same[None, :, None, None].expand_as(x)))


def test_double_attention_is_efficient_attention_with_one_head():
    double = shaken(DoubleAttention)
    x = torch.randn(2, 16, 3, 4, dtype=torch.float64)
    v, k, q = double.project(x.permute(0, 2, 3, 1)).unsqueeze(3).chunk(3, dim=-1)
    out = double.expand(content_attention(q.softmax(-1), k, v).flatten(3)).permute(0, 3, 1, 2)
    assert_close(double(x), x + double.norm(out))


def test_normalisation_leaves_only_the_sign_of_compact_attention():
    """A finding on the released block: its attention is one factor a group, which its group normalisation removes."""
    module = small_module(CompactNonLocal, dim=32)
    module.norm.eps = 0
    x = torch.randn(2, 32, 5, 4, dtype=torch.float64)
    theta, phi, g = module.project(x).chunk(3, dim=1)
    sign = (phi * g).unflatten(1, (8, -1)).sum(dim=(2, 3, 4)).sign().repeat_interleave(4, dim=1)
    assert_close(module(x), x + sign[:, :, None, None] * module.norm(module.expand(theta)))


def test_criss_cross_scores_are_lines_not_pairs():
    """Nothing that it saves for the backward pass grows with the square of the pixels."""
    module = CrissCrossAttention(8, recurrence=1)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        module(torch.randn(1, 8, 24, 20, requires_grad=True))
    assert max(sizes) <= 24 * 20 * (24 + 20)


def test_sine_positions():
    positions = sine_positions(3, 5, 16, torch.device("cpu"), torch.float64)
    assert_close(positions, brute_positions(3, 5, 16))
    assert len(positions.unique(dim=0)) == 15


def test_layers_of_the_transformers_start_different():
    for module, layers in ((m := VideoTransformer(16, 16), m.encoder.layers), (m := DETRTransformer(16, 16), m.layers)):
        first, second = (dict(layer.named_parameters()) for layer in layers[:2])
        assert all(not torch.equal(first[n], second[n]) for n in first if first[n].dim() > 1), module


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not CrissCrossHead], ids=lambda kind: kind.__name__)
def test_bad_maps(kind):
    module = small_module(kind).float()
    with pytest.raises(ValueError, match="must have 16 channels, got 8"):
        module(torch.randn(1, 8, 3, 3))
    with pytest.raises(ValueError, match=r"must be a map \(batch, 16, height, width\)"):
        module(torch.randn(16, 3, 3))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_empty_batches(kind):
    module = small_module(kind).eval()
    shape = module(torch.randn(1, 16, 3, 3, dtype=torch.float64)).shape
    assert module(torch.randn(0, 16, 3, 3, dtype=torch.float64)).shape == (0, *shape[1:])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CompactNonLocal(20), "dim must be divisible by num_groups, got 20 for 8 groups"),
        (lambda: CompactNonLocal(24), "dim_inner must be divisible by num_groups, got 12 for 8 groups"),
        (lambda: EfficientAttention(20), "dim_inner must be divisible by the number of heads, got 10 for 8 heads"),
        (lambda: CrissCrossAttention(16, recurrence=0), "recurrence must be 1 or more, got 0"),
        (lambda: DETRTransformer(16, 18), "dim_out must be a multiple of 4, got 18"),
        (lambda: DETRTransformer(16, 12), "divisible by the number of heads, got 12 for 8 heads"),
        (lambda: VideoTransformer(16, 12), "divisible by the number of heads, got 12 for 8 heads"),
        (lambda: VideoTransformer(16, 16, max_frames=4)(torch.randn(1, 16, 5, 1)), "a clip of 5 frames is longer than"),
        (lambda: VideoTransformer(16, 16).encode(torch.randn(2, 8)), r"must be \(batch, time, 16\), got \(2, 8\)"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
