"""What all modules that replace convolutions, or stand beside them, have in common."""

import copy
import pickle

import pytest
import torch
from helpers import relative_error
from torch.testing import assert_close

from gsanet.layers import (
    AttentionAugmentedConv,
    LocalRelation,
    PairwiseAttention,
    PatchwiseAttention,
    PositionSensitiveAttention,
    StandAloneAttention,
)

MODULES = {
    AttentionAugmentedConv: {"num_heads": 2},
    LocalRelation: {},
    StandAloneAttention: {"num_heads": 2},
    PairwiseAttention: {"dim_relation": 4},
    PatchwiseAttention: {"dim_relation": 4},
    PositionSensitiveAttention: {"num_heads": 2},
}
every_module = pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)


def make(kind, dim=16, dim_out=None, feat_size=(7, 6), **kwargs):
    return kind(dim, dim_out, feat_size, **{**MODULES[kind], **kwargs})


@every_module
@pytest.mark.parametrize("stride", [1, 2])
def test_shapes_and_every_gradient(kind, stride):
    module = make(kind, 16, 24, stride=stride)
    x = torch.randn(2, 16, 7, 6, requires_grad=True)
    out = module(x)
    assert out.shape == (2, 24, -(-7 // stride), -(-6 // stride))  # as a strided convolution rounds
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    without = [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 1e-6]
    assert not without
    assert torch.isfinite(x.grad).all()


@every_module
def test_any_size_of_map(kind):
    module = make(kind, feat_size=(12, 11))
    for size in ((12, 11), (1, 5), (3, 1), (1, 1), (2, 8)):
        module.eval()
        assert module(torch.randn(1, 16, *size)).shape == (1, 16, *size)


@every_module
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kind, dtype):
    module = make(kind).train()
    for _ in range(5):
        module(torch.randn(4, 16, 7, 6))  # norms that know what to expect
    module.eval()
    half = copy.deepcopy(module).to(dtype)
    x = torch.randn(2, 16, 7, 6)
    out = half(x.to(dtype))
    assert out.dtype == dtype
    assert relative_error(out, module(x)) < 40 * torch.finfo(dtype).eps
    half.train()
    x = x.to(dtype).requires_grad_()
    half(x).float().square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters())


@every_module
def test_autocast(kind):
    module = make(kind).eval()
    x = torch.randn(2, 16, 7, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert relative_error(out, module(x)) < 0.1
    out.float().square().sum().backward()
    assert torch.isfinite(x.grad).all()


@every_module
@pytest.mark.parametrize("training", [False, True])
def test_compile(kind, training):
    torch._dynamo.reset()
    few = {"window": 3} if kind in (PairwiseAttention, PatchwiseAttention) else {}  # a graph of 9 neighbours, not 49
    module = make(kind, **few).train(training)
    twin = copy.deepcopy(module)
    x = torch.randn(2, 16, 7, 6, requires_grad=True)
    out = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    expected = twin(x)
    assert_close(out, expected)
    (grad,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, expected))
    assert_close(grad, wanted, rtol=1e-4, atol=1e-5)
    for name, buffer in module.named_buffers():
        assert_close(buffer, dict(twin.named_buffers())[name])


@every_module
def test_channels_last_changes_nothing(kind):
    module = make(kind).eval()
    x = torch.randn(2, 16, 7, 6)
    assert_close(module(x.contiguous(memory_format=torch.channels_last)), module(x))


@every_module
def test_copies_and_resets(kind):
    module = make(kind).eval()
    x = torch.randn(1, 16, 7, 6)
    expected = module(x)
    fresh = make(kind).eval()
    assert not torch.equal(fresh(x), expected)
    fresh.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(twin(x), expected)
    module.reset_parameters()
    assert not torch.equal(module(x), expected)


@every_module
def test_translation(kind):
    """Positions are relative: away from borders, shifting the input shifts the output."""
    if kind.properties.everywhere:
        pytest.skip("a global module has no pixels away from borders")
    module = make(kind).double().eval()
    x = torch.randn(1, 16, 16, 15, dtype=torch.float64)
    moved = module(torch.roll(x, (2, 1), (2, 3)))
    assert_close(moved[..., 6:12, 5:11], module(x)[..., 4:10, 4:10])


@every_module
def test_starts_at_a_sensible_size(kind):
    """Neither the variance of the output nor any weight starts far from what a convolution's would."""
    module = make(kind, 64, feat_size=14).train()
    out = module(torch.randn(8, 64, 14, 14).relu())
    assert 0.01 < out.var().item() < 10


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: StandAloneAttention(12), ValueError, "divisible by twice the number of heads, got 12 for 8"),
        (lambda: PositionSensitiveAttention(12, feat_size=4), ValueError, "twice the number of heads, got 12 for 8"),
        (lambda: StandAloneAttention(16, num_heads=0), ValueError, "num_heads must be 1 or more, got 0"),
        (lambda: PositionSensitiveAttention(16), ValueError, "feat_size is None"),
        (lambda: AttentionAugmentedConv(8, feat_size=4), ValueError, "exceed the number of heads, got 8 for 8 heads"),
        (lambda: AttentionAugmentedConv(64, feat_size=4, stride=3), ValueError, "powers of 2, got 3 and 1"),
        (lambda: LocalRelation(12), ValueError, "channels that share a weight, got 12 for 8"),
        (lambda: LocalRelation(8, 16, transform=False), ValueError, "without a transformation.*got 16 and 8"),
        (lambda: LocalRelation(16, share=2.0), TypeError, r"share must be a whole number, got 2\.0"),
        (lambda: PairwiseAttention(12), ValueError, "channels that share a weight, got 12 for 8"),
        (lambda: StandAloneAttention(16, window=4), ValueError, "window must be an odd number of pixels, got 4"),
        (lambda: PatchwiseAttention(16, window=0), ValueError, "window must be an odd number of pixels, got 0"),
        (lambda: make(LocalRelation)(torch.randn(1, 8, 4, 4)), ValueError, "must have 16 channels, got 8"),
        (lambda: make(PairwiseAttention)(torch.randn(8, 4, 4)), ValueError, "must be a map"),
        (lambda: make(StandAloneAttention)([1.0]), TypeError, "must be a tensor, got list"),
        (lambda: make(StandAloneAttention, stride=0)(torch.randn(1, 16, 4, 4)), ValueError, "stride must be 1 or more"),
        (lambda: make(PatchwiseAttention)(torch.randn(1, 16, 4, 0)), ValueError, "must have at least one pixel"),
        (
            lambda: make(PositionSensitiveAttention)(torch.randn(1, 16, 9, 6)),
            ValueError,
            "a map of 9x6 is larger than the 7x6",
        ),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
