"""The projection of q, k and v with the context vectors in one kernel, `kernels/projection.cu`.

Plans are made for a GPU with few multiprocessors, on a real one too, so that small batches are enough for it.
"""

import copy
from dataclasses import replace

import pytest
import torch
from functional.fused.test_kernels import (
    BF16,
    COLUMN,
    FLOAT,
    HALF,
    MACHINES,
    check_close,
    check_module,
    make_module,
    normal,
    same_bits,
)
from torch import nn

import gsanet
from gsanet.functional import fused, use_backend
from gsanet.functional.backends import BACKENDS
from gsanet.functional.fused import calls, module_ops, projection
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.plan import Machine, Shape, plan_projection
from gsanet.functional.fused.plan import projection as projection_plans
from gsanet.functional.fused.plan.projection import CUTS

ENTRY = "project_with_context"


@pytest.fixture
def small(kernels, monkeypatch):
    """Kernels that are planned for a small GPU: set `multiprocessors`."""
    kernels.multiprocessors = 1
    h200 = MACHINES["H200"]
    monkeypatch.setattr(launching, "machine", lambda device: replace(h200, multiprocessors=kernels.multiprocessors))
    return kernels


@pytest.fixture
def short(small, monkeypatch):
    """The same for maps of any size, in stretches of 32 pixels."""
    monkeypatch.setattr(projection_plans, "ON_CHIP", {64: range(1, 300), 128: range(1, 300)})
    cuts = {channels: cut._replace(length=32, blocks=1) for channels, cut in CUTS.items()}
    monkeypatch.setattr(projection_plans, "CUTS", cuts)
    plan_projection.cache_clear()
    yield small
    plan_projection.cache_clear()


def exact(x, weight, heads):
    """In float64, by the keys and values that are rounded: q, v, the context vectors, and the keys."""
    dtype, channels = x.dtype, x.shape[3]
    projected = x.double() @ weight.double().T
    q, k, v = projected.unflatten(3, (3, heads, -1)).unbind(3)
    k, v_rounded = (one.to(dtype).double().flatten(1, 2) for one in (k, v))
    context = torch.einsum("bnhk,bnhv->bhkv", k.softmax(1), v_rounded)
    assert q.shape[3:] == (heads, channels // heads)
    return q, v, context, k


def flat(found):
    return [found.q, found.v, *found.vectors]


@pytest.mark.parametrize(
    ("dtype", "batch", "size", "channels", "heads", "multiprocessors", "pieces"),
    [
        (BF16, 2, (16, 16), 64, 8, 1, 1),
        (HALF, 3, (19, 17), 64, 8, 1, 1),  # more images than blocks; 323 pixels: groups of 16 that are not full
        (BF16, 2, (19, 16), 64, 4, 1, 1),  # wide heads
        (BF16, 3, (19, 17), 128, 8, 1, 1),
        (HALF, 2, (16, 16), 128, 8, 1, 1),
        (BF16, 2, (16, 17), 128, 16, 1, 1),  # narrow heads
        (BF16, 1, (39, 27), 64, 8, 2, 3),
        (HALF, 1, (33, 25), 128, 8, 2, 2),
    ],
    ids=str,
)
def test_projection(small, dtype, batch, size, channels, heads, multiprocessors, pieces):
    small.multiprocessors = multiprocessors
    x = normal(batch, *size, channels, dtype=dtype).to(small.device)
    weight = (normal(3 * channels, channels, seed=1) * channels**-0.5).to(dtype).to(small.device)
    with small.running():
        found = calls.project_with_context(x, weight, heads)
        assert small.entries == ({ENTRY} if pieces == 1 else {ENTRY, "context_combine"})
        q, v, context, keys = exact(x, weight, heads)
        check_close("q", found.q, q, dtype)
        check_close("v", found.v, v, dtype)
        key = channels // heads
        vectors = calls.unpacked(found.vectors.context, key, key)
        check_close("context vectors", vectors, context, dtype)
        assert torch.equal(calls.unpacked(found.vectors.turned, key, key).mT, vectors)
        check_close("largest keys", found.vectors.key_max, keys.amax(1), dtype)
        sums = (keys - found.vectors.key_max.double()[:, None]).exp().sum(1)
        check_close("1 / sums", found.vectors.key_inverse, 1 / sums, dtype)
        for _ in small.other_orders():
            again = calls.project_with_context(x, weight, heads)
            assert same_bits(flat(again), flat(found))
    items = [plan.grid[0] for plan in small.launched if plan.kernel.entry == ENTRY]
    assert set(items) == {min(batch * pieces, multiprocessors * CUTS[channels].blocks)}


def test_the_largest_key_may_come_at_the_end(small):
    """Sums so far are about a smaller key, in each warp's pixels, and in each stretch of them."""
    x = normal(1, 24, 24, 64, dtype=BF16)
    rising = torch.linspace(-40, 40, 24 * 24).view(1, 24, 24)
    x[..., 0] = rising.to(BF16)
    weight = (normal(192, 64, seed=1) / 8).to(BF16)
    weight[64:128, 0] = torch.linspace(-1, 1, 64).to(BF16)  # some fall, others rise
    x, weight = x.to(small.device), weight.to(small.device)
    with small.running():
        found = calls.project_with_context(x, weight, 8)
    *_, context, keys = exact(x, weight, 8)
    check_close("context vectors", calls.unpacked(found.vectors.context, 8, 8), context, BF16)
    assert keys.amax() - keys.amin() > 70


def test_two_ways_give_the_same(small):
    """But for the order of sums: the matrix product, and the kernel that reads k and v, are what it stands for."""
    x = normal(2, 17, 16, 64, dtype=HALF).to(small.device)
    weight = (normal(192, 64, seed=1) / 8).to(HALF).to(small.device)
    with small.running():
        one = calls.project_with_context(x, weight, 8)
        q, k, v = (x @ weight.T).unflatten(3, (3, 8, 8)).unbind(3)
        vectors = calls.context_vectors(k, v)
    for found, usual in zip([one.q, one.v, *one.vectors], [q, v, *vectors], strict=True):
        assert found.dtype == usual.dtype
        assert found.shape == usual.shape
        torch.testing.assert_close(found, usual, rtol=2e-3, atol=1e-3)


@pytest.fixture(params=[128, 64], ids=["all again", "k again"])
def kept(request, monkeypatch):
    """What is projected again in the gradient of 64 channels."""
    monkeypatch.setattr(projection, "KEPT_IN_PART", request.param)


@pytest.fixture(params=[False, True], ids=["two products", "one kernel"])
def gradients(request, monkeypatch):
    """How the gradients of the projection are made; whether by one kernel."""
    monkeypatch.setattr(projection, "gradients_wanted", request.param)
    return request.param


@pytest.mark.parametrize("options", [{}, {"stride": 2}, COLUMN], ids=str)
def test_module_in_training(short, kept, gradients, options):
    """Its gradients are those of the other way: what is not kept of q, k and v is projected again."""
    check_module(short, make_module(BF16, 64, (8, 6), **options).train(), BF16, 2, (8, 6))
    assert ENTRY in short.entries
    assert ("pixel_products" in short.entries) == gradients
    assert not any(constants["SOFTMAX"] for constants in short.constants("context_partial"))


def test_what_is_kept(short, kept, monkeypatch):
    """By both ways: q and v of each pixel, or nothing."""
    x = normal(2, 64, 8, 6, dtype=BF16).to(short.device, memory_format=torch.channels_last)
    weight = (normal(192, 64, seed=1) / 8).to(BF16).to(short.device)
    expected = (x.permute(0, 2, 3, 1).flatten(0, 2) @ weight.T).unflatten(1, (3, 64))
    with short.running():
        ways = [projection.project_heads(x, weight, 8, 64, True)]
        monkeypatch.setattr(projection, "project_on_chip", lambda *arguments: None)
        ways.append(projection.project_heads(x, weight, 8, 64, True))
    assert short.entries == {ENTRY, "context_partial"}
    for *_, found in ways:
        if projection.KEPT_IN_PART > 64:
            assert found.numel() == 0
        else:
            torch.testing.assert_close(found, expected[:, ::2].flatten(1), rtol=2e-2, atol=2e-2)
            q, k, v = projection.recall(found, x, weight, 8, 64, True)
            for one, other in zip((q, k, v), expected.unbind(1), strict=True):
                torch.testing.assert_close(one.flatten(3).flatten(0, 2), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("channels", "size", "changes", "expected"),
    [
        (64, 56, {}, 0),
        (128, 16, {}, 256),
        (128, 15, {}, 0),
        (256, 14, {}, 768),
        (128, 28, {"content": False}, 0),
        (128, 28, {"dim_key": 64}, 0),
        (128, 28, {"dtype": torch.float32}, 0),
    ],
)
def test_how_much_is_kept(monkeypatch, channels, size, changes, expected):
    monkeypatch.setattr(projection, "KEPT_IN_PART", 128)
    options = {"content": True, "dim_key": channels, "dtype": BF16} | changes
    x = torch.empty(2, channels, size, size, dtype=options.pop("dtype"), device="meta")
    rows = channels + (2 if options["content"] else 1) * options["dim_key"]
    assert projection.channels_kept(x, x.new_empty(rows, channels), **options) == expected


def test_inference(short, monkeypatch):
    takes_all = replace(fused.BACKEND, refuses=lambda *arguments, **settings: None)
    monkeypatch.setitem(BACKENDS, "fused", takes_all)
    block = nn.Sequential(make_module(BF16, 64, (8, 6)), nn.BatchNorm2d(64), nn.ReLU()).to(BF16).eval()
    folded = gsanet.fuse_for_inference(block).to(short.device)
    x = normal(2, 64, 8, 6, dtype=BF16)
    with torch.no_grad(), use_backend("reference"):
        expected = copy.deepcopy(block).double()(x.double())
    with torch.inference_mode(), short.running():
        for first, memory_format in ((ENTRY, torch.channels_last), ("context_partial", torch.contiguous_format)):
            short.launched.clear()
            out = folded(x.to(short.device, memory_format=memory_format))
            assert [plan.kernel.entry for plan in short.launched] == [first, "line_forward", "line_forward"]
            check_close("output", out, expected, BF16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("channels", [64, 128])
def test_a_bad_image_stays_alone(short, channels, bad):
    """A block goes from one image to the next, and stretches of both are in its memory at the same time."""
    x = normal(4, 7, 7, channels, dtype=BF16).to(short.device)
    weight = normal(3 * channels, channels, dtype=BF16, seed=1).to(short.device)
    with short.running():
        expected = calls.project_with_context(x, weight, 8)
        for image in (0, 1):
            worse = x.clone()
            worse[image] = bad
            others = [i for i in range(4) if i != image]
            found = calls.project_with_context(worse, weight, 8)
            for value, usual in zip(flat(found), flat(expected), strict=True):
                assert torch.equal(value[others], usual[others])
            for value in (found.q, found.v, found.vectors.turned):
                assert not value[image].isfinite().any()
    assert short.launched[0].grid == (1, 1)


def test_compiled(short):
    module = make_module(BF16, 64, (8, 6)).to(short.device).eval()
    x = normal(2, 64, 8, 6, dtype=BF16).to(short.device, memory_format=torch.channels_last)
    with torch.no_grad(), short.running():
        expected = module(x)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()
    assert short.entries == {ENTRY, "line_forward"}


def test_operators_are_registered_as_they_should_be(short, kept):
    x = normal(2, 64, 8, 6, dtype=BF16).to(short.device, memory_format=torch.channels_last)
    weight = normal(192, 64, dtype=BF16).to(short.device)
    tables = [normal(2 * length - 1, 8, dtype=BF16).to(short.device) for length in (8, 6)]
    norm = torch.ones(5, 64, device=short.device)
    tests = ("test_schema", "test_faketensor")
    arguments = (x, weight, *tables, norm[0], norm[1], norm[2], None, 8, 64, True, 1, 1e-5)
    torch.library.opcheck(module_ops.attention_map, arguments, test_utils=tests)
    arguments = (x, weight, *tables, norm[:2], None, 8, 64, True, 1)
    torch.library.opcheck(module_ops.attention_map_inference, arguments, test_utils=tests)
    assert len(short.constants(ENTRY)) >= 2


# --- Where it is the plan.


def planned_for(name, images, pixels, dtype=BF16, heads=8, key=8, value=None, vector=True):
    return plan_projection(MACHINES[name], Shape(dtype, heads, key, value or key, vector), pixels, images)


@pytest.mark.parametrize(
    ("pixels", "key", "images"),
    [(56 * 56, 8, 256), (56 * 56, 16, 256), (28 * 28, 16, 256), (1024, 8, 512), (256, 16, 512)],
)
def test_large_batches_of_the_networks(pixels, key, images):
    plan = planned_for("H200", images, pixels, key=key)
    assert plan.pieces == 1
    (launch,) = plan.launches
    blocks = CUTS[8 * key].blocks
    assert launch.grid == (min(images, 132 * blocks), 1)
    # So many blocks are on a multiprocessor at once; each takes a kilobyte more than it asks for.
    assert blocks * (launch.shared_bytes + 1024) <= MACHINES["H200"].shared_memory_in_all


def test_smaller_batches():
    """As long as there are pixels for all blocks: images then come in pieces, none of them empty."""
    plan = planned_for("H200", 64, 56 * 56)
    assert plan.pieces == 4
    assert plan.left == 8  # two sets of warps in a block
    assert [launch.kernel.entry for launch in plan.launches] == [ENTRY, "context_combine"]
    assert plan.launches[0].grid == (256, 1)
    for images in range(22, 400, 9):
        plan = planned_for("H200", images, 56 * 56)
        length = -(-25 // plan.pieces)
        assert (plan.pieces - 1) * length < 25
    for images in (1, 8, 21):
        assert planned_for("H200", images, 56 * 56) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": FLOAT},
        {"vector": False},
        {"value": 16},
        {"heads": 4},  # 32 channels
        {"heads": 2, "key": 32},
        {"key": 32},  # 256 channels
        {"pixels": 225},
    ],
    ids=str,
)
def test_others_go_the_other_way(changes):
    usual = {"images": 512, "pixels": 56 * 56}
    assert planned_for("H200", **usual) is not None
    assert planned_for("H200", **usual | changes) is None


def test_cards_with_less_shared_memory():
    assert planned_for("A100", 256, 784, key=16) is not None
    assert planned_for("RTX 4090", 256, 784, key=16) is None  # the weight does not fit
    plan = planned_for("RTX 4090", 256, 56 * 56)
    assert plan.launches[0].shared_bytes <= 99 * 1024
    assert plan.launches[0].grid[0] <= 128


@pytest.mark.parametrize("options", [{"dim_out": 128}, {"dim_key": 128}, {"content": False}], ids=str)
def test_modules_of_several_widths_go_the_other_way(planned, options):
    planned.machine = Machine(1, 227 * 1024, 228 * 1024)
    for more, entry in ((options, "line_forward"), ({}, ENTRY)):
        planned.launched.clear()
        module = gsanet.GlobalSelfAttention(64, feat_size=(16, 16), **more, dtype=BF16).eval()
        module(torch.zeros(2, 64, 16, 16, dtype=BF16).to(memory_format=torch.channels_last))
        assert entry in planned.entries
        assert (ENTRY in planned.entries) == (entry == ENTRY)


def test_maps_and_weights_that_are_not_at_16_bytes(small):
    """They go the other way, and parts of wider maps that are go this one."""
    weight = normal(192, 64, dtype=BF16).to(small.device)
    x = normal(2, 16, 16, 64, dtype=BF16).to(small.device)
    wide = torch.zeros(2, 16, 16, 80, dtype=BF16, device=small.device)
    with small.running():
        expected = calls.project_with_context(x, weight, 8)
        wide[..., 8:72] = x
        found = calls.project_with_context(wide[..., 8:72], weight, 8)
        assert same_bits(flat(found), flat(expected))
        assert calls.project_with_context(wide[..., 4:68], weight, 8) is None
        shifted = torch.zeros(192 * 64 + 1, dtype=BF16, device=small.device)[1:].view(192, 64)
        assert calls.project_with_context(x, shifted, 8) is None
        turned = weight.T.contiguous().T
        found = calls.project_with_context(x, turned, 8)
        assert same_bits(flat(found), flat(expected))
