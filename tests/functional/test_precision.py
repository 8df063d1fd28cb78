"""Half precisions against float64, large keys, autocast, and how much memory is touched."""

import pytest
import torch
from helpers import gradients, maps, relative_error, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsanet.functional import content_attention, global_self_attention, positional_attention, use_backend

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
SHAPES = [((2, 14, 14, 8), 8, 8), ((2, 28, 20, 4), 16, 12), ((1, 7, 9, 1), 5, 3)]


def make(shape, k, v, dtype, device):
    """float64 inputs that the lower precision holds exactly, of the sizes met in a network."""
    tables = (table(length, k) / (k * length) ** 0.5 for length in shape[1:3])
    tensors = (*maps(shape, k, v), *tables)
    return [tensor.to(dtype).double().to(device).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_against_float64(device, dtype, shape, k, v):
    exact = make(shape, k, v, dtype, device)
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    with use_backend("reference"):
        expected = global_self_attention(*exact)
    with use_backend("torch"):
        value = global_self_attention(*low)
    assert value.dtype == dtype
    assert relative_error(value, expected) < TOLERANCE[dtype]
    for got, want in zip(gradients(value, low), gradients(expected, exact), strict=True):
        assert relative_error(got, want) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [1, 30, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_large_keys(backend, device, dtype, scale):
    q, k, v = (tensor.to(dtype) for tensor in maps((2, 14, 14, 2), 8, 8, device=device))
    k = (k * scale).requires_grad_()
    out = content_attention(q, k, v)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(grad).all() for grad in gradients(out, [k]))


def test_small_weights_do_not_vanish_in_float16(device):
    """Over 262,144 pixels a softmax weight is about 4e-6, where float16 has only some 60 steps left below it."""
    q, k, v = (tensor.to(torch.float16) for tensor in maps((1, 512, 512, 1), 8, 8, device=device))
    with use_backend("torch"):
        value = content_attention(q, k, v)
    assert relative_error(value, content_attention(q.double(), k.double(), v.double())) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_follows_the_dtype_and_keeps_gradients_in_float32(backend, device, dtype):
    exact = make((2, 14, 14, 8), 8, 8, dtype, device)
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    with torch.autocast(device, dtype=dtype):
        value = global_self_attention(*single, norm=torch.nn.BatchNorm2d(64, device=device))
    assert value.dtype == dtype
    expected = global_self_attention(*exact, norm=torch.nn.BatchNorm2d(64, device=device, dtype=torch.float64))
    assert relative_error(value, expected) < TOLERANCE[dtype]
    assert all(grad.dtype == torch.float32 for grad in gradients(value, single))


def test_autocast_leaves_float64_alone(backend):
    q, k, v = maps((1, 3, 3, 1), 2, 2)
    with torch.autocast("cpu"):
        assert content_attention(q, k, v).dtype == torch.float64


class LiveTensors(TorchDispatchMode):
    """Records the largest tensor that any operation makes, and every one of at least `size` elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.largest, self.alive, self.most = size, 0, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            elements = storage.nbytes() // tensor.element_size()
            self.largest = max(self.largest, elements)
            if elements >= self.size and storage.data_ptr() not in self.alive:
                pointer = storage.data_ptr()
                self.alive[pointer] = True
                weakref.finalize(storage, self.alive.pop, pointer, None)
                self.most = max(self.most, len(self.alive))
        return out


def test_one_score_tensor_at_a_time():
    """Forward and backward through both axes: never two tensors of (batch, x, y, head, length), and none larger."""
    shape, k, v = (2, 16, 16, 4), 4, 4
    scores = 2 * 16 * 16 * 4 * 16
    inputs = (*maps(shape, k, v, grad=True), table(16, k, grad=True), table(16, k, grad=True))
    with use_backend("torch"), LiveTensors(scores) as live:
        out = global_self_attention(*inputs)
        out.sum().backward()
    assert live.largest == scores  # one-hot tensors would be 16 * 16 * 31, but P or S copied would show here
    assert live.most == 1


def test_row_and_column_cost_the_same_memory():
    q, _, v = maps((2, 8, 16, 2), 4, 4)
    with use_backend("torch"), LiveTensors(1) as live:
        positional_attention(q, v, table(16, 4), "row")
    assert live.largest == 2 * 8 * 16 * 2 * 16
