"""Products of few rows, `kernels/product.cu`: 1x1 convolutions and projections of one image or a few."""

import math

import pytest
import torch
from functional.fused.graphs import both_ways, capture, replay
from functional.fused.test_kernels import BF16, FLOAT, HALF, MACHINES, check_close, normal, same_bits

from gsanet.functional.fused import calls
from gsanet.functional.fused.dependent import dependent_launches
from gsanet.functional.fused.plan import plan_product
from gsanet.functional.fused.plan import product as product_plans
from gsanet.functional.fused.plan.product import Cut, cut_product

ENTRY = "product"

# pixels, channels, columns of one image through GSA-ResNet-50: the convolutions, with those of the shortcuts, and the
# projections.
SHAPES = [
    (3136, 64, 256), (3136, 64, 64), (3136, 64, 192), (3136, 256, 64), (3136, 256, 128), (3136, 128, 384),
    (784, 256, 512), (784, 128, 512), (784, 512, 128), (784, 128, 384), (784, 512, 256), (784, 256, 768),
    (196, 512, 1024), (196, 256, 1024), (196, 1024, 256), (196, 256, 768), (196, 1024, 512), (196, 512, 1536),
    (49, 1024, 2048), (49, 512, 2048), (49, 2048, 512), (49, 512, 1536),
]  # fmt: skip


@pytest.fixture
def use(monkeypatch):
    """A function that has plans made of one cut."""

    def choose(cut):
        monkeypatch.setattr(product_plans, "_cuts", lambda channels: [cut])
        clear()

    def clear():
        cut_product.cache_clear()
        plan_product.cache_clear()

    monkeypatch.setattr(product_plans, "MOST_BLOCKS", 10**6)
    clear()
    yield choose
    clear()


def example(batch, size, channels, columns, dtype, device, stride=(1, 1), bias=True, residual=True):
    """The arguments of `calls.product`, without settings."""
    x = normal(batch, *size, channels, dtype=dtype).to(device)
    weight = (normal(columns, channels, seed=1) * channels**-0.5).to(dtype).to(device)
    added = normal(columns, dtype=dtype, seed=2).to(device) if bias else None
    out = x[:, :: stride[0], :: stride[1]].shape[:3]
    return x, weight, added, normal(*out, columns, dtype=dtype, seed=3).to(device) if residual else None


def exact(x, weight, bias=None, residual=None, *, relu=False, stride=(1, 1)):
    out = x[:, :: stride[0], :: stride[1]].double() @ weight.double().T
    for added in (bias, residual):
        out = out if added is None else out + added.double()
    return out.relu() if relu else out


@pytest.mark.parametrize(
    ("cut", "dtype", "batch", "size", "channels", "columns", "options"),
    [
        (Cut(16, 16, 16, 16, 8, 2), BF16, 1, (7, 7), 256, 32, {"relu": True}),
        (Cut(16, 16, 16, 16, 16), HALF, 1, (7, 3), 512, 16, {"relu": True}),
        (Cut(16, 32, 16, 32, 4), BF16, 1, (5, 7), 128, 64, {}),
        (
            Cut(32, 64, 32, 32, 2, 2),
            BF16,
            1,
            (5, 7),
            64,
            72,
            {"relu": True},
        ),  # columns and pixels that do not fill a tile
        (Cut(32, 32, 16, 16, 1), HALF, 3, (4, 5), 80, 40, {}),
        (Cut(64, 64, 32, 32, 1), BF16, 2, (7, 7), 64, 64, {"relu": True}),
        (Cut(64, 16, 16, 16, 2), BF16, 1, (9, 9), 96, 24, {"relu": True, "stride": (2, 2)}),
        (Cut(16, 64, 16, 16, 1, 2), HALF, 2, (8, 6), 96, 64, {"stride": (2, 1)}),
        (Cut(32, 32, 32, 16, 2), BF16, 2, (6, 5), 64, 32, {"stride": (2, 2), "early_weight": True}),
        (Cut(16, 32, 16, 16, 4, 2), BF16, 1, (1, 1), 128, 32, {"early_weight": True}),
    ],
    ids=str,
)
def test_product(kernels, use, cut, dtype, batch, size, channels, columns, options):
    use(cut)
    early = options.pop("early_weight", False)
    # All options of what is added with a few of the cuts: each is a kernel of its own, to be compiled for the host.
    for bias, residual in ((True, True), (False, False), (True, False)) if cut.parts == 8 else ((True, True),):
        arguments = example(
            batch, size, channels, columns, dtype, kernels.device, options.get("stride", (1, 1)), bias, residual
        )
        with kernels.running():
            out = calls.product(*arguments, **options, early_weight=early)
            check_close("product", out, exact(*arguments, **options), dtype)
            assert out.is_contiguous()
            if residual:
                for _ in kernels.other_orders():
                    assert torch.equal(calls.product(*arguments, **options, early_weight=early), out)
        (constants,) = kernels.constants(ENTRY)[-1:]
        assert (constants["BIAS"], constants["RESIDUAL"], constants["EARLY_WEIGHT"]) == (bias, residual, early)
        assert constants["STRIDED"] == ("stride" in options)


def test_memory_around_is_not_touched(kernels, use):
    """Nor is anything but the pixels: what lies between those of a stride, and behind a part of a wider map."""
    use(Cut(32, 32, 16, 16, 1))
    x, weight, bias, _ = example(1, (5, 7), 32, 40, BF16, kernels.device, residual=False)
    wide = torch.full((1, 5, 7, 64), float("nan"), dtype=BF16, device=kernels.device)
    wide[..., 16:48] = x
    holed = torch.full((1, 10, 14, 32), float("nan"), dtype=BF16, device=kernels.device)
    holed[:, ::2, ::2] = x
    with kernels.running():
        expected = calls.product(x, weight, bias)
        assert torch.equal(calls.product(wide[..., 16:48], weight, bias), expected)
        assert torch.equal(calls.product(holed, weight, bias, stride=(2, 2)), expected)
        assert torch.equal(calls.product(holed[:, ::2, ::2], weight, bias), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_pixel_stays_alone(kernels, use, bad):
    use(Cut(32, 32, 16, 16, 2))
    x, weight, bias, residual = example(1, (5, 7), 64, 32, BF16, kernels.device)
    with kernels.running():
        expected = calls.product(x, weight, bias, residual, relu=True)
        x[0, 2, 3] = bad
        found = calls.product(x, weight, bias, residual, relu=True)
    others = torch.ones(5, 7, dtype=torch.bool)
    others[2, 3] = False
    assert torch.equal(found[0, others], expected[0, others])
    if bad != bad:
        assert found[0, 2, 3].isnan().all()


def test_bad_columns_stay_alone(kernels, use):
    use(Cut(16, 32, 16, 16, 2))
    x, weight, *_ = example(1, (4, 4), 64, 64, BF16, kernels.device, bias=False, residual=False)
    with kernels.running():
        expected = calls.product(x, weight)
        weight[5] = float("nan")
        found = calls.product(x, weight)
    assert found[..., 5].isnan().all()
    others = [i for i in range(64) if i != 5]
    assert torch.equal(found[..., others], expected[..., others])


# --- Where it is the plan.


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_of_one_image(name, shape):
    pixels, channels, columns = shape
    machine = MACHINES[name]
    if machine.shared_memory < 2 * 32 * channels:
        assert cut_product(machine, *shape) is None  # not even the smallest tile fits
        return
    plan = plan_product(
        machine, BF16, *shape, bias=True, residual=False, relu=True, strided=False, early_weight=False
    )  # fmt: skip
    constants = dict(plan.kernel.constants)
    assert plan.shared_bytes <= machine.shared_memory
    assert plan.grid == (-(-pixels // constants["LENGTH"]), -(-columns // constants["COLUMNS"]))
    blocks = plan.grid[0] * plan.grid[1]
    assert blocks <= product_plans.MOST_BLOCKS * machine.multiprocessors
    if name == "H200":
        assert blocks >= 78  # most multiprocessors have work
    assert plan.threads == 32 * constants["WARPS"] <= 512


def test_large_batches_and_other_widths_go_the_other_way():
    def plan(images, channels=256, columns=768, dtype=BF16):
        how = {"bias": False, "residual": False, "relu": False, "strided": False, "early_weight": False}
        return plan_product(MACHINES["H200"], dtype, images * 784, channels, columns, **how)

    assert plan(1) is not None
    assert plan(1, dtype=HALF) is not None
    assert plan(64) is None
    assert plan(0) is None
    assert plan(1, dtype=FLOAT) is None
    assert plan(1, channels=72) is None
    assert plan(1, columns=36) is None
    assert plan(1, channels=16384) is None


def test_operands_that_are_not_at_16_bytes(kernels, use):
    use(Cut(32, 32, 16, 16, 2))
    x, weight, bias, residual = example(1, (5, 7), 64, 32, BF16, kernels.device)

    def shifted(tensor):
        return torch.zeros(tensor.numel() + 1, dtype=BF16, device=kernels.device)[1:].view(tensor.shape)

    with kernels.running():
        assert calls.product(x, weight, bias, residual) is not None
        assert calls.product(shifted(x), weight, bias, residual) is None
        assert calls.product(x, shifted(weight), bias, residual) is None
        assert calls.product(x, weight, shifted(bias), residual) is None
        assert calls.product(x, weight, bias, shifted(residual)) is None
        assert calls.product(x, weight.T.contiguous().T, bias, residual) is None
        assert calls.product(x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1), weight, bias, residual) is None
        assert calls.product(x, weight, bias.float(), residual) is None


# --- On a GPU: all shapes of one image, launched early and as usual.


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_on_gpu(gpu, shape, dtype):
    pixels, channels, columns = shape
    size = (math.isqrt(pixels),) * 2
    arguments = example(1, size, channels, columns, dtype, "cuda")
    with gpu.running():
        for added in (arguments, (*arguments[:3], None), (*arguments[:2], None, None)):
            for relu in (False, True):
                out = calls.product(*added, relu=relu)
                check_close("product", out, exact(*added, relu=relu), dtype)
                assert torch.equal(calls.product(*added, relu=relu, early_weight=True), out)
        wide = example(1, tuple(2 * side for side in size), channels, columns, dtype, "cuda", (2, 2))
        out = calls.product(*wide, stride=(2, 2))
        check_close("with a stride", out, exact(*wide, stride=(2, 2)), dtype)
    assert gpu.entries == {ENTRY}


def chain(x, weights, residual):
    """There and back again, several times; behind the first kernel the weights are read early."""
    results = []
    for i, (up, down, bias) in enumerate(weights):
        x = calls.product(x, up, bias, residual, relu=True, early_weight=i > 0)
        x = calls.product(x, down, early_weight=True)
        results.append(x)
    return results


@pytest.mark.parametrize(("pixels", "channels"), [(3136, 64), (784, 128), (196, 256), (49, 512)])
def test_chains_on_gpu(gpu, pixels, channels):
    """The same bits, early and as usual, called and in a CUDA graph, with weights that were just written."""
    side = math.isqrt(pixels)
    x, _, _, residual = example(1, (side, side), channels, 4 * channels, BF16, "cuda")
    shapes = (4 * channels, channels), (channels, 4 * channels), (4 * channels,)
    values = [
        [(normal(*shape, seed=seed) * shape[-1] ** -0.5).to(BF16).cuda() for shape in shapes] for seed in range(6)
    ]
    weights = [[torch.empty_like(tensor) for tensor in one] for one in values]

    def run():
        # By kernels, the last of them that of a weight which the second product reads early.
        for own, given in reversed([*zip(weights, values, strict=True)]):
            for i in (2, 0, 1):
                torch.mul(given[i], 1, out=own[i])
        return chain(x, weights, residual)

    with gpu.running(poison=False):
        run()
        pairs = both_ways(lambda: capture(run))
        for seed in range(10):
            x.copy_(normal(*x.shape, dtype=BF16, seed=seed).cuda())
            values[seed % 6][0].neg_()
            early, usual = replay(pairs)
            with dependent_launches(True):
                called = run()
            torch.cuda.synchronize()
            assert same_bits(early, usual)
            assert same_bits(called, usual)
        expected = x
        for up, down, bias in values:
            expected = exact(exact(expected, up, bias, residual, relu=True).to(BF16), down).to(BF16)
        check_close("a chain", called[-1], expected.double(), BF16)
