"""The local products against explicit loops, in output and gradients, and what they cost."""

import pytest
import torch
from helpers import gradients, relative_error
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gsanet.functional import local
from gsanet.functional.local import mirror, outside
from gsanet.functional.local_ops import local_mix, local_scores, local_spread

# Size of the output map, of the map of neighbours, window, stride, padding.
CASES = [
    ((5, 4), (5, 4), 3, 1, 1),
    ((3, 4), (5, 7), 5, 2, 2),
    ((2, 3), (8, 9), 7, 1, 0),
    ((2, 1), (2, 1), 7, 1, 3),  # most of the window is outside
    ((2, 2), (5, 4), 3, 3, 1),
]


def neighbours(inner, outer, window, stride, padding):
    for x in range(inner[0]):
        for y in range(inner[1]):
            for i in range(window):
                for j in range(window):
                    there = (stride * x + i - padding, stride * y + j - padding)
                    if 0 <= there[0] < outer[0] and 0 <= there[1] < outer[1]:
                        yield (x, y), there, i * window + j


def brute_scores(q, k, *options):
    out = torch.zeros(*q.shape[:4], options[0] ** 2, dtype=q.dtype)
    for (x, y), (i, j), o in neighbours(q.shape[1:3], k.shape[1:3], *options):
        out[:, x, y, :, o] = (q[:, x, y] * k[:, i, j]).sum(-1)
    return out


def brute_mix(weights, v, *options):
    out = torch.zeros(*weights.shape[:4], v.shape[4], dtype=v.dtype)
    for (x, y), (i, j), o in neighbours(weights.shape[1:3], v.shape[1:3], *options):
        out[:, x, y] = out[:, x, y] + weights[:, x, y, :, o, None] * v[:, i, j]
    return out


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("inner", "outer", "window", "stride", "padding"), CASES)
def test_against_loops(inner, outer, window, stride, padding):
    options = (window, stride, padding)
    q, weights = random(2, *inner, 3, 4), random(2, *inner, 3, window**2)
    k = random(2, *outer, 3, 4)
    for op, brute, first in ((local_scores, brute_scores, q), (local_mix, brute_mix, weights)):
        out, expected = op(first, k, *options), brute(first, k, *options)
        assert_close(out, expected)
        for grad, wanted in zip(gradients(out, (first, k)), gradients(expected, (first, k)), strict=True):
            assert_close(grad, wanted)


@pytest.mark.parametrize(("inner", "outer", "window", "stride", "padding"), CASES)
@pytest.mark.parametrize("reason", ["is_transformed", "is_exporting"])
def test_unfolded_where_only_pytorch_s_operators_will_do(reason, inner, outer, window, stride, padding, monkeypatch):
    options = (window, stride, padding)
    q, weights = random(2, *inner, 3, 4), random(2, *inner, 3, window**2)
    k = random(2, *outer, 3, 4)
    expected = local.local_scores(q, k, *options), local.local_mix(weights, k, *options)
    monkeypatch.setattr(local, reason, lambda: True)
    monkeypatch.delattr(local, "local_ops")
    found = local.local_scores(q, k, *options), local.local_mix(weights, k, *options)
    assert_close(found, expected)


def test_gradients_of_gradients():
    q, k, weights = random(1, 3, 2, 2, 2), random(1, 5, 4, 2, 2), random(1, 3, 2, 2, 9)
    for call, inputs in (
        (lambda a, b: local_scores(a, b, 3, 2, 1), (q, k)),
        (lambda a, b: local_mix(a, b, 3, 2, 1), (weights, k)),
        (lambda a, b: local_spread(a, b, 5, 4, 3, 2, 1), (weights, q)),
    ):
        assert torch.autograd.gradgradcheck(call, inputs)


def test_are_proper_operators():
    q, k, weights = random(1, 3, 2, 2, 2), random(1, 5, 4, 2, 2), random(1, 3, 2, 2, 9)
    torch.library.opcheck(local_scores, (q, k, 3, 2, 1))
    torch.library.opcheck(local_mix, (weights, k, 3, 2, 1))
    torch.library.opcheck(local_spread, (weights, q, 5, 4, 3, 2, 1))


def test_operations_are_those_of_the_equation():
    q, weights = torch.empty(2, 6, 5, 3, 4, device="meta"), torch.empty(2, 6, 5, 3, 49, device="meta")
    with FlopCounterMode(display=False) as counter:
        local_scores(q, q, 7, 1, 3)
    assert counter.get_total_flops() == 2 * 2 * 6 * 5 * 3 * 4 * 49
    with FlopCounterMode(display=False) as counter:
        local_mix(weights, q, 7, 1, 3)
    assert counter.get_total_flops() == 2 * 2 * 6 * 5 * 3 * 4 * 49


def test_no_neighbourhood_is_unfolded():
    """Forward and backward (these three are each other's), no tensor is larger than the scores or the inputs."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    q, k, v = torch.randn(3, 12 * 10 * 2 * 32).view(3, 1, 12, 10, 2, 32).unbind()
    with Watch():  # it sees a custom op from outside only: here are the loops themselves
        weights = local_scores._init_fn(q, k, 7, 1, 3)
        out = local_mix._init_fn(weights, v.clone(), 7, 1, 3)
        local_spread._init_fn(weights, out, 12, 10, 7, 1, 3)
    maps = 3 * out.numel()  # q, k and v share their memory
    assert largest == maps
    assert weights.numel() < maps
    assert maps < 49 * out.numel() // 10  # which is what unfolding takes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype):
    weights, v = torch.rand(1, 6, 6, 2, 49).softmax(-1).to(dtype), torch.randn(1, 6, 6, 2, 8).to(dtype)
    exact = local_mix(weights.double(), v.double(), 7, 1, 3)
    assert local_mix(weights, v, 7, 1, 3).dtype == dtype
    assert relative_error(local_mix(weights, v, 7, 1, 3), exact) < 2 * torch.finfo(dtype).eps


def test_outside():
    hidden = outside((3, 4), 3, torch.device("cpu")).unflatten(2, (3, 3))
    for x in range(3):
        for y in range(4):
            for i in range(3):
                for j in range(3):
                    assert hidden[x, y, i, j] == (not (0 <= x + i - 1 < 3 and 0 <= y + j - 1 < 4))


def test_mirror():
    x = torch.randn(2, 6, 5, 3)
    expected = torch.nn.functional.pad(x.permute(0, 3, 1, 2), (3, 3, 3, 3), mode="reflect").permute(0, 2, 3, 1)
    assert torch.equal(mirror(x, 3), expected)
    line = mirror(torch.tensor([[[1.0], [2.0]]]), 3)[0, :, 0]  # a map of 2x1, mirrored back and forth
    assert line.tolist() == [2, 1, 2, 1, 2, 1, 2, 1]


def test_the_map_s_border_compiles():
    compiled = torch.compile(outside, fullgraph=True, backend="eager")
    assert torch.equal(compiled((4, 6), 3, torch.device("cpu")), outside((4, 6), 3, torch.device("cpu")))
