"""Sums over pixels of products of channels, of channels, and a map of channels beside it: `kernels/pixel_products.cu`.

Numbers are whole and small, so that all sums are exact, in whatever order they are made.
"""

from dataclasses import replace

import pytest
import torch
from functional.fused.host import fenced
from functional.fused.test_kernels import BF16, FLOAT, HALF, MACHINES, check_close, normal, same_bits, seeded

from gsanet.functional.fused import calls
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.dependent import dependent_launches
from gsanet.functional.fused.plan import pixel_products as product_plans
from gsanet.functional.fused.plan import plan_pixel_products
from gsanet.functional.fused.plan.pixel_products import CUTS, MAPPED, Cut

ENTRIES = {"pixel_products", "sum_pixel_products"}
PLANNED = {f"{x} and {y}{', the same' if same else ''}": (x, y, same) for x, y, same in CUTS}


@pytest.fixture(autouse=True)
def plans_of_each_test():
    plan_pixel_products.cache_clear()
    yield
    plan_pixel_products.cache_clear()


def whole_numbers(pixels, channels, dtype=BF16, seed=0):
    return torch.randint(-8, 9, (pixels, channels), generator=seeded(seed)).to(dtype)


def make_maps(key, pixels, dtype=BF16):
    """x and y."""
    columns, rows, same = key
    x = whole_numbers(pixels, columns, dtype)
    return (x, x) if same else (x, whole_numbers(pixels, rows, dtype, seed=1))


def inside(kernels, numbers):
    """57 pixels as a part of a wider map, with what is not a number on all sides."""
    wide = torch.full((70, numbers.shape[1] + 24), torch.nan, dtype=BF16)
    wide[5:62, 8:-16] = numbers
    return wide.to(kernels.device)[5:62, 8:-16]


def check_exact(kernels, x, y):
    """Against whole numbers; in other orders too."""
    expected = [(y.double().T @ x.double()).float(), y.double().sum(0).float()]
    x_there = x.to(kernels.device)
    y_there = x_there if x is y else y.to(kernels.device)
    with kernels.running():
        found = calls.pixel_products(x_there, y_there)
        assert same_bits([one.cpu() for one in found], expected)
        for _ in kernels.other_orders():
            assert same_bits(calls.pixel_products(x_there, y_there), found)
    assert kernels.entries == ENTRIES


@pytest.mark.parametrize("key", {cut: key for key, cut in reversed(CUTS.items())}.values(), ids=str)
def test_as_planned(kernels, key):
    """Each cut that there is; a second stretch of pixels for some of the blocks."""
    kernels.machine = replace(MACHINES["H200"], multiprocessors=1)
    check_exact(kernels, *make_maps(key, CUTS[key].blocks * CUTS[key].length + 3))


# What the plans make use of, and what they could: channels of x and y, whether x is y, and how that is cut.
SMALL_CUTS = {
    "one unit, on and above the diagonal": ((64, 64, True), Cut(64, 64, 64, 64, 2, 32, 3, 2)),
    "units on and above the diagonal": ((64, 64, True), Cut(64, 64, 16, 16, 1, 16, 2, 1)),
    "blocks on and above the diagonal": ((96, 96, True), Cut(32, 32, 16, 32, 2, 32, 3, 2)),
    "one block": ((32, 64, False), Cut(64, 32, 32, 16, 1, 16, 4, 1)),
    "sets": ((64, 32, False), Cut(32, 64, 32, 64, 3, 48, 2, 1)),
    "parts of both": ((64, 96, False), Cut(32, 32, 16, 32, 1, 32, 3, 3)),
    "more units along than rows of 16": ((64, 32, False), Cut(32, 64, 32, 16, 1, 32, 2, 2)),
}


@pytest.fixture(params=SMALL_CUTS.values(), ids=SMALL_CUTS)
def small_cut(request, monkeypatch):
    """Channels of both maps."""
    key, cut = request.param
    monkeypatch.setattr(product_plans, "CUTS", {key: cut})
    return key


@pytest.mark.parametrize("pixels", [0, 1, 95, 333])
def test_cuts(kernels, small_cut, pixels):
    check_exact(kernels, *make_maps(small_cut, pixels))


def test_half_precision(kernels, monkeypatch):
    key, cut = SMALL_CUTS["sets"]
    monkeypatch.setattr(product_plans, "CUTS", {key: cut})
    check_exact(kernels, *make_maps(key, 95, HALF))


def test_random_maps(kernels, small_cut):
    columns, rows, same = small_cut
    x = normal(200, columns, dtype=BF16).to(kernels.device)
    y = x if same else normal(200, rows, dtype=BF16, seed=1).to(kernels.device)
    with kernels.running():
        found = calls.pixel_products(x, y)
    check_close("products", found.products, y.double().T @ x.double(), FLOAT)
    check_close("sums", found.sums, y.double().sum(0), FLOAT)
    if same:
        assert torch.equal(found.products, found.products.T)


def test_nothing_around_the_maps_counts(kernels, small_cut):
    x, y = make_maps(small_cut, 57)
    with kernels.running():
        x_inside = inside(kernels, x)
        found = calls.pixel_products(x_inside, x_inside if x is y else inside(kernels, y))
    expected = [(y.double().T @ x.double()).float(), y.double().sum(0).float()]
    assert same_bits([one.cpu() for one in found], expected)


def test_nothing_behind_the_maps_is_read(kernels, small_cut):
    if kernels.device != "cpu":
        pytest.skip("memory of the host")
    x, y = make_maps(small_cut, 41)
    x_fenced = fenced(x)
    check_exact(kernels, x_fenced, x_fenced if x is y else fenced(y))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_channel_stays_alone(kernels, small_cut, bad):
    _, rows, same = small_cut
    x, y = (one.to(kernels.device) for one in make_maps(small_cut, 100))
    with kernels.running():
        usual = calls.pixel_products(x, x if same else y)
        for channel in (0, 17, rows - 1):
            worse = y.clone()
            worse[60, channel] = bad
            products, sums = calls.pixel_products(worse if same else x, worse)
            is_bad = torch.arange(rows, device=kernels.device) == channel
            assert torch.equal(sums.isfinite(), ~is_bad)
            assert torch.equal(sums[~is_bad], usual.sums[~is_bad])
            # A whole row is bad, as zero times infinity is not a number, and a column too if x is y.
            others = torch.ones_like(products, dtype=torch.bool)
            others[channel] = False
            if same:
                others[:, channel] = False
            assert torch.equal(products.isfinite(), others)
            assert torch.equal(products[others], usual.products[others])


def test_compiled_ahead(planned, monkeypatch):
    """From the shapes of meta tensors alone, the kernels that are launched later."""
    compiled = []
    monkeypatch.setattr(launching, "compile_all", lambda kernels, _: compiled.extend(kernels))
    monkeypatch.setattr(launching, "architecture_of", lambda device: "sm_90")
    for key in CUTS:
        planned.launched.clear()
        compiled.clear()
        x, y = make_maps(key, 20)
        calls.pixel_products(x, y)
        x_meta = x.to("meta")
        y_meta = x_meta if x is y else y.to("meta")
        calls.compile_ahead(torch.device("cuda", 0), lambda x=x_meta, y=y_meta: calls.pixel_products(x, y))
        assert compiled == [plan.kernel for plan in planned.launched]
        assert {kernel.entry for kernel in compiled} == ENTRIES


# --- With a map of y's channels: the gradients of a 1x1 convolution.

# What the plan makes use of, and what it could: channels of x and d_out, and how that is cut.
SMALL_MAPS = {
    "all pixels of a stretch for each warp": ((32, 32), Cut(32, 32, 16, 32, 1, 16, 3, 1)),
    "parts of a stretch": ((32, 64), Cut(64, 32, 32, 16, 1, 32, 2, 2)),
    "parts of 32 pixels": ((32, 64), Cut(64, 32, 32, 16, 1, 64, 3, 1)),
    "sets for the sums": ((32, 64), Cut(64, 32, 32, 32, 2, 32, 2, 1)),
    "more channels in than out": ((64, 32), Cut(32, 64, 16, 32, 1, 16, 2, 1)),
}


@pytest.fixture(params=SMALL_MAPS.values(), ids=SMALL_MAPS)
def small_map(request, monkeypatch):
    """Channels of x and d_out."""
    key, cut = request.param
    monkeypatch.setattr(product_plans, "MAPPED", {key: cut})
    return key


def make_convolution(key, pixels, dtype=BF16):
    """d_out, x and the weight."""
    columns, rows = key
    sizes = (pixels, rows), (pixels, columns), (rows, columns)
    return [whole_numbers(*size, dtype, seed) for seed, size in enumerate(sizes)]


def check_gradients(kernels, d_out, x, weight):
    """Against whole numbers, rounded once; in other orders too."""
    expected = d_out.double() @ weight.double(), d_out.double().T @ x.double()
    there = [one.to(kernels.device) for one in (d_out, x, weight)]
    with kernels.running():
        found = calls.pointwise_gradients(*there)
        assert same_bits([one.cpu() for one in found], [one.to(x.dtype) for one in expected])
        for _ in kernels.other_orders():
            assert same_bits(calls.pointwise_gradients(*there), found)
    assert kernels.entries == {"pixel_products", "table_gradient"}


@pytest.mark.parametrize("key", MAPPED, ids=str)
def test_gradients_as_planned(kernels, key):
    kernels.machine = replace(MACHINES["H200"], multiprocessors=1)
    check_gradients(kernels, *make_convolution(key, MAPPED[key].blocks * MAPPED[key].length + 3))


@pytest.mark.parametrize("pixels", [0, 1, 95, 333])
def test_gradients(kernels, small_map, pixels):
    check_gradients(kernels, *make_convolution(small_map, pixels))


def test_gradients_in_half_precision(kernels, monkeypatch):
    key, cut = SMALL_MAPS["parts of 32 pixels"]
    monkeypatch.setattr(product_plans, "MAPPED", {key: cut})
    d_out, x, weight = make_convolution(key, 95, HALF)
    check_gradients(kernels, d_out / 8, x / 8, weight / 8)


def test_gradients_of_parts_of_wider_maps(kernels, small_map):
    d_out, x, weight = make_convolution(small_map, 57)
    with kernels.running():
        usual = calls.pointwise_gradients(*(one.to(kernels.device) for one in (d_out, x, weight)))
        found = calls.pointwise_gradients(inside(kernels, d_out), inside(kernels, x), weight.to(kernels.device))
    assert same_bits(found, usual)


def test_nothing_behind_a_convolution_is_read(kernels, small_map):
    if kernels.device != "cpu":
        pytest.skip("memory of the host")
    check_gradients(kernels, *map(fenced, make_convolution(small_map, 41)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_pixel_stays_alone(kernels, small_map, bad):
    d_out, x, weight = (one.to(kernels.device) for one in make_convolution(small_map, 100))
    others = torch.arange(100, device=kernels.device) != 60
    with kernels.running():
        usual, _ = calls.pointwise_gradients(d_out, x, weight)
        d_out[60] = bad
        found, d_weight = calls.pointwise_gradients(d_out, x, weight)
    assert torch.equal(found[others], usual[others])
    assert not found[60].isfinite().any()
    assert not d_weight.isfinite().any()


def test_what_has_no_gradients_in_one_kernel(planned):
    ((columns, rows),) = MAPPED
    d_out, x, weight = make_convolution((columns, rows), 20)
    assert calls.pointwise_gradients(d_out, x, weight) is not None
    assert calls.pointwise_gradients(d_out.float(), x.float(), weight.float()) is None
    assert calls.pointwise_gradients(d_out, x, weight.half()) is None
    assert calls.pointwise_gradients(d_out, x.half(), weight) is None
    assert calls.pointwise_gradients(d_out[:, 16:], x, weight[16:]) is None  # channels that are not in the table
    assert calls.pointwise_gradients(d_out, x, weight.T.contiguous().T) is None
    wide = torch.zeros(20, columns + 8, dtype=BF16)
    assert calls.pointwise_gradients(d_out, wide[:, 4:-4], weight) is None  # an address that is no multiple of 16 bytes


# --- Where it is the plan.


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("key", PLANNED.values(), ids=PLANNED)
def test_plans(name, key):
    machine, cut = MACHINES[name], CUTS[key]
    for pixels in (0, 1, 1000, 32_768, 802_816):
        plan = plan_pixel_products(machine, BF16, pixels, *key)
        if plan is None:
            assert name == "RTX 4090"
            continue
        first, total = plan.launches
        constants = dict(first.kernel.constants)
        blocks, parts = constants["BLOCKS"], first.grid[1]
        assert first.shared_bytes <= machine.shared_memory
        assert blocks * (first.shared_bytes + 1024) <= machine.shared_memory_in_all
        assert name == "RTX 4090" or (blocks, constants["STAGES"] > 2) == (cut.blocks, True)
        assert first.grid[0] == plan.pieces
        assert 1 <= plan.pieces <= max(1, -(-pixels // cut.length))  # no block without pixels
        # All of them at once, and not more, as each leaves a whole result behind.
        assert plan.pieces <= machine.multiprocessors * blocks // parts
        if pixels == 802_816:
            assert plan.pieces == machine.multiprocessors * blocks // parts
        assert total.grid == (-(-key[1] * (key[0] + 1) // 32), 1)


def test_cards_with_less_shared_memory(monkeypatch):
    def planned_for(name, length):
        monkeypatch.setattr(product_plans, "CUTS", {(64, 256, False): Cut(256, 64, 64, 32, 1, length, 4, 2)})
        plan_pixel_products.cache_clear()
        plan = plan_pixel_products(MACHINES[name], BF16, 10_000, 64, 256, False)
        return plan and tuple(dict(plan.launches[0].kernel.constants)[name] for name in ("STAGES", "BLOCKS"))

    assert planned_for("H200", 32) == (4, 2)
    assert planned_for("A100", 32) == (3, 2)  # rather fewer stages than blocks
    assert planned_for("RTX 4090", 32) == (2, 2)
    assert planned_for("RTX 4090", 64) == (2, 1)
    assert planned_for("RTX 4090", 128) is None


def test_what_is_refused(planned):
    key = next(key for key in CUTS if not key[2])
    x, y = make_maps(key, 20)
    assert calls.pixel_products(x, y) is not None
    assert calls.pixel_products(x.float(), y.float()) is None
    assert calls.pixel_products(x, y.half()) is None
    assert calls.pixel_products(x[:, 8:], y) is None  # channels that are not in the table
    assert calls.pixel_products(x.T.contiguous().T, y) is None
    for move, extra in ((4, 8), (8, 12)):  # an address, and a distance, that is no multiple of 16 bytes
        wide = torch.zeros(20, x.shape[1] + extra, dtype=BF16)
        assert calls.pixel_products(wide[:, move : move + x.shape[1]], y) is None
    assert plan_pixel_products(planned.machine, BF16, 2**31, *key) is None


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("key", MAPPED, ids=str)
def test_plans_of_gradients(name, key):
    machine, cut = MACHINES[name], MAPPED[key]
    for pixels in (0, 1, 802_816):
        plan = plan_pixel_products(machine, BF16, pixels, *key, same=False, mapped=True)
        if plan is None:
            assert name == "RTX 4090"
            continue
        (launch,) = plan.launches
        assert launch.grid == (plan.pieces, 1)
        assert launch.shared_bytes <= machine.shared_memory
        assert plan.pieces == (machine.multiprocessors * cut.blocks if pixels > 1 else 1)


# --- On a GPU: the networks' shapes.

SHAPES = [
    (802_816, 64, 64), (802_816, 64, 256), (200_704, 128, 128), (200_704, 128, 512), (200_704, 256, 256),
    (200_704, 256, 512), (50_176, 256, 1024), (50_177, 256, 256), (131_073, 64, 256), (32_769, 128, 512),
]  # fmt: skip


@pytest.mark.parametrize(("pixels", "columns", "rows"), SHAPES, ids=str)
def test_large_maps_on_gpu(gpu, pixels, columns, rows):
    same = columns == rows
    if plan_pixel_products(launching.machine(torch.device("cuda", 0)), BF16, pixels, columns, rows, same) is None:
        pytest.skip("cuBLAS has these")
    torch.manual_seed(0)
    x = torch.randn(pixels, columns, device="cuda").relu().to(BF16)
    y = x if same else torch.randn(pixels, rows, device="cuda").to(BF16)
    results = []
    with gpu.running():
        for early in (False, True, False):
            with dependent_launches(early):
                results.append(calls.pixel_products(x, y))
        torch.cuda.synchronize()
    found = results[0]
    assert all(same_bits(found, other) for other in results[1:])
    exact = sum(b.double().T @ a.double() for a, b in zip(x.split(2**16), y.split(2**16), strict=True))
    for value, expected in zip(found, (exact, y.double().sum(0)), strict=True):
        # Tensor cores cut off what other units round, at each of some hundred additions.
        assert (value - expected).abs().max() <= 5e-5 * expected.abs().max()


@pytest.mark.parametrize("pixels", [802_816, 524_289])
def test_gradients_of_large_maps_on_gpu(gpu, pixels):
    ((columns, rows),) = MAPPED
    torch.manual_seed(0)
    d_out, x, weight = (
        torch.randn(*size, device="cuda").to(BF16) for size in ((pixels, rows), (pixels, columns), (rows, columns))
    )
    results = []
    with gpu.running():
        for early in (False, True, False):
            with dependent_launches(early):
                results.append(calls.pointwise_gradients(d_out, x, weight))
        torch.cuda.synchronize()
    found = results[0]
    if found is None:
        pytest.skip("there is no room for it on this card")
    assert all(same_bits(found, other) for other in results[1:])
    pieces = zip(d_out.split(2**16), x.split(2**16), strict=True)
    d_weight = sum(one.double().T @ other.double() for one, other in pieces)
    d_x = torch.cat([part.double() @ weight.double() for part in d_out.split(2**16)])
    for value, expected in zip(found, (d_x, d_weight), strict=True):
        assert (value - expected).abs().max() <= 5e-3 * expected.abs().max()
