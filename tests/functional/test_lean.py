"""The backend `torch` on CPUs, where it cuts a batch into images and turns narrow products."""

import pytest
import torch
from helpers import gradients, maps, relative_error, table
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsanet import GlobalSelfAttention
from gsanet.functional import content_attention, global_self_attention, lean, positional_attention, use_backend

ROUNDING = 1e-12
# Narrow and wide heads, keys and values of different widths, heads that cannot be paired, an odd batch.
SHAPES = [
    ((3, 5, 4, 8), 8, 8),
    ((3, 4, 5, 2), 16, 20),
    ((2, 3, 4, 3), 8, 24),
    ((3, 3, 4, 6), 5, 3),
    ((1, 1, 6, 1), 1, 1),
]


@pytest.fixture(params=["two lines at a time", "two images at a time"])
def cut(request, monkeypatch):
    """What large maps go through, on small ones."""
    images, lines = {"two lines at a time": (1, 2), "two images at a time": (2, 99)}[request.param]

    def pieces(q):
        starts = [(image, line) for image in range(0, q.shape[0], images) for line in range(0, q.shape[2], lines)]
        return [(slice(image, image + images), slice(None), slice(line, line + lines)) for image, line in starts]

    monkeypatch.setattr(lean, "LARGE_IMAGE", 1)
    monkeypatch.setattr(lean, "_pieces", pieces)


def make(shape, k, v, grad=True):
    tables = (table(length, k, grad=grad) for length in shape[1:3])
    return (*maps(shape, k, v, grad=grad), *tables)


def assert_same(value, expected, inputs):
    assert relative_error(value, expected) < ROUNDING
    for got, want in zip(gradients(value, inputs), gradients(expected, inputs), strict=True):
        assert relative_error(got, want) < ROUNDING


def on_both(function, *inputs):
    with use_backend("torch"):
        value = function(*inputs)
    with use_backend("reference"):
        return value, function(*inputs)


@pytest.mark.parametrize("reach", [None, 2])
@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_cut_batch_against_the_reference(cut, shape, k, v, reach):
    inputs = make(shape, k, v)
    assert_same(*on_both(lambda *x: global_self_attention(*x, reach=reach), *inputs), inputs)


@pytest.mark.parametrize("axis", ["column", "row"])
@pytest.mark.parametrize("rows", [3, 15])
def test_cut_batch_with_a_table_of_another_length(cut, axis, rows):
    q, _, v = maps((3, 5, 4, 2), 4, 3, grad=True)
    rel = table((rows + 1) // 2, 4, grad=True)
    assert_same(*on_both(lambda *x: positional_attention(*x, axis), q, v, rel), (q, v, rel))


@pytest.mark.parametrize("index", range(5))
def test_cut_batch_with_one_gradient_only(cut, index):
    inputs = make((3, 5, 4, 2), 4, 3, grad=False)
    inputs[index].requires_grad_()
    assert_same(*on_both(global_self_attention, *inputs), inputs[index : index + 1])


def test_cut_batch_of_strided_maps(cut):
    """q, k and v as parts of one projection, and a map seen transposed."""
    projected = torch.randn(3, 5, 4, 2 * 10, dtype=torch.float64, requires_grad=True)
    tables = table(4, 4), table(5, 4)

    def attend(projected):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in projected.split((8, 8, 4), dim=-1))
        return global_self_attention(q, k, v, *tables)

    assert_same(*on_both(attend, projected), (projected,))


def test_cut_batch_differentiates_twice(cut):
    inputs = make((3, 3, 2, 2), 2, 3)
    with use_backend("torch"):
        assert torch.autograd.gradcheck(global_self_attention, inputs)
        assert torch.autograd.gradgradcheck(global_self_attention, inputs)


def test_cut_batch_without_images(cut):
    with use_backend("torch"):
        assert global_self_attention(*make((0, 4, 3, 2), 4, 3)).shape == (0, 4, 3, 2, 3)


def test_cut_batch_keeps_small_weights_in_float16():
    q, k, v = (tensor.to(torch.float16) for tensor in maps((1, 512, 512, 1), 8, 8))
    assert q[0].numel() >= lean.LARGE_IMAGE
    with use_backend("torch"):
        value = content_attention(q, k, v)
    assert relative_error(value, content_attention(q.double(), k.double(), v.double())) < 1e-3


class LargestStorage(TorchDispatchMode):
    """The most elements that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, storage)
        return out


def test_scores_of_a_large_map_are_never_whole():
    """At 56x56x64 the scores are 56 / 8 times a map; forward and backward, nothing larger than a map is made."""
    inputs = [tensor.detach().float().requires_grad_() for tensor in make((4, 56, 56, 8), 8, 8)]
    with use_backend("torch"), LargestStorage() as largest:
        out = global_self_attention(*inputs)
        out.sum().backward()
    assert largest.elements == inputs[0].numel()


def test_large_map_is_the_same_eager_compiled_and_exported_for_any_batch():
    torch._dynamo.reset()
    module = GlobalSelfAttention(64, feat_size=48).eval()
    assert lean.LARGE_IMAGE <= 48 * 48 * 64
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(module, (torch.randn(2, 64, 48, 48),), dynamic_shapes={"x": {0: batch}}).module()
    with torch.no_grad():
        compiled(torch.randn(2, 64, 48, 48))
        for size in (3, 5):
            x = torch.randn(size, 64, 48, 48)
            expected = module(x)
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
            assert_close(exported(x), expected, rtol=1e-4, atol=1e-5)
