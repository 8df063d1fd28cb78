"""A linear map of each pixel's channels, with what is behind it: `kernels/channel_map.cu`.

Numbers are whole and small, so that all sums are exact, in whatever order they are made; the result is rounded once.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from functional.fused.host import fenced
from functional.fused.test_kernels import BF16, HALF, MACHINES, normal, same_bits, seeded

from gsanet.functional.fused import calls
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.dependent import dependent_launches
from gsanet.functional.fused.plan import channel_map as plans
from gsanet.functional.fused.plan import plan_channel_map
from gsanet.functional.fused.plan.channel_map import CUTS, Cut

OPTIONS = ("level", "addend", "mask")


@pytest.fixture(autouse=True)
def plans_of_each_test():
    plan_channel_map.cache_clear()
    yield
    plan_channel_map.cache_clear()


def whole_numbers(*shape, dtype=BF16, seed=0, most=8):
    return torch.randint(-most, most + 1, shape, generator=seeded(seed)).to(dtype)


def make_operands(key, pixels, options, dtype=BF16):
    """By the names that `calls.map_channels` has for them."""
    first, second, columns = key
    operands = {
        "first": whole_numbers(pixels, first, dtype=dtype),
        "weight": whole_numbers(first, columns, dtype=dtype, seed=1, most=2),
    }
    if second:
        operands["second"] = whole_numbers(pixels, second, dtype=dtype, seed=2)
        operands["second_weight"] = whole_numbers(second, columns, dtype=dtype, seed=3, most=2)
    for name, shape in (("level", (columns,)), ("addend", (pixels, columns)), ("mask", (pixels, columns))):
        if name in options:
            operands[name] = whole_numbers(*shape, dtype=dtype, seed=len(name))
    return operands


def in_float64(first, weight, second=None, second_weight=None, level=None, addend=None, mask=None, relu=False):
    out = first.double() @ weight.double()
    if second is not None:
        out += second.double() @ second_weight.double()
    for more in (level, addend):
        out = out if more is None else out + more.double()
    out = out if mask is None else torch.where(mask > 0, out, 0)
    return out.relu() if relu else out


def check_exact(kernels, operands, relu=False):
    """Against whole numbers; in other orders too."""
    expected = in_float64(**operands, relu=relu).to(operands["first"].dtype)
    there = {name: one.to(kernels.device) for name, one in operands.items()}
    with kernels.running():
        found = calls.map_channels(**there, relu=relu)
        assert same_bits([found.cpu()], [expected])
        for _ in kernels.other_orders():
            assert same_bits([calls.map_channels(**there, relu=relu)], [found])
    assert kernels.entries == {"map_channels"}


def use_of(key):
    """What the networks ask for: the sum of two products, or the gradient that enters a block."""
    return ("level",) if key[1] else ("addend", "mask")


@pytest.mark.parametrize("key", CUTS, ids=str)
def test_as_planned(kernels, key):
    """Each cut that there is; a second stretch of pixels for some of the blocks."""
    kernels.machine = replace(MACHINES["H200"], multiprocessors=key[2] // CUTS[key].columns)
    check_exact(kernels, make_operands(key, CUTS[key].blocks * CUTS[key].length + 3, use_of(key)))


# What the plans make use of, and what they could: channels of both maps and of the output, and how that is cut.
SMALL_CUTS = {
    "one warp": ((64, 0, 32), Cut(32, 1, 1, 16, 2, 1)),
    "sets of columns": ((32, 0, 64), Cut(64, 1, 2, 32, 3, 2)),
    "columns of blocks": ((64, 0, 96), Cut(32, 1, 2, 16, 4, 2)),
    "two maps": ((32, 16, 64), Cut(64, 1, 1, 16, 2, 1)),
    "two parts": ((64, 32, 32), Cut(32, 2, 2, 32, 2, 1)),
    "parts of both maps": ((64, 64, 64), Cut(32, 4, 1, 64, 2, 1)),
}


@pytest.fixture(params=SMALL_CUTS.values(), ids=SMALL_CUTS)
def small_cut(request, monkeypatch):
    """Channels of both maps and of the output."""
    key, cut = request.param
    monkeypatch.setattr(plans, "CUTS", {key: cut})
    return key


@pytest.mark.parametrize("pixels", [0, 1, 95, 333])
def test_cuts(kernels, small_cut, pixels):
    check_exact(kernels, make_operands(small_cut, pixels, OPTIONS))


@pytest.mark.parametrize("chosen", [*itertools.product((False, True), repeat=3)], ids=str)
def test_what_is_behind_the_product(kernels, monkeypatch, chosen):
    key, cut = SMALL_CUTS["two parts"]
    monkeypatch.setattr(plans, "CUTS", {key: cut})
    check_exact(kernels, make_operands(key, 70, set(itertools.compress(OPTIONS, chosen))))


@pytest.mark.parametrize("key", [(64, 0, 256), (128, 0, 512)], ids=str)
def test_ends_of_blocks(kernels, key):
    kernels.machine = replace(MACHINES["H200"], multiprocessors=key[2] // CUTS[key].columns)
    check_exact(kernels, make_operands(key, CUTS[key].blocks * CUTS[key].length + 3, ("level", "addend")), relu=True)


def test_what_is_not_a_number_passes_a_relu(kernels):
    operands = make_operands((64, 0, 256), 20, ("level", "addend"))
    operands["addend"][3, 5] = torch.nan
    with kernels.running():
        found = calls.map_channels(**{name: one.to(kernels.device) for name, one in operands.items()}, relu=True)
    assert found.isnan().nonzero().tolist() == [[3, 5]]


def test_half_precision(kernels, monkeypatch):
    key, cut = SMALL_CUTS["two maps"]
    monkeypatch.setattr(plans, "CUTS", {key: cut})
    check_exact(kernels, make_operands(key, 95, OPTIONS, HALF))


def test_random_maps(kernels, small_cut):
    """No further from float64 than rounding once."""
    shapes = {name: one.shape for name, one in make_operands(small_cut, 100, OPTIONS).items()}
    operands = {name: normal(*shape, dtype=BF16, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    with kernels.running():
        found = calls.map_channels(**{name: one.to(kernels.device) for name, one in operands.items()}).cpu().double()
    expected = in_float64(**operands)
    assert ((found - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


def test_nothing_around_the_maps_counts(kernels, small_cut):
    """Parts of wider maps, with what is not a number on all sides."""

    def inside(numbers):
        wide = torch.full((70, numbers.shape[1] + 24), torch.nan, dtype=BF16)
        wide[5:62, 8:-16] = numbers
        return wide.to(kernels.device)[5:62, 8:-16]

    operands = make_operands(small_cut, 57, OPTIONS)
    there = {
        name: inside(one) if name in ("first", "second") else one.to(kernels.device) for name, one in operands.items()
    }
    with kernels.running():
        found = calls.map_channels(**there)
    assert same_bits([found.cpu()], [in_float64(**operands).to(BF16)])


def test_nothing_behind_the_maps_is_touched(kernels, small_cut, monkeypatch):
    if kernels.device != "cpu":
        pytest.skip("memory of the host")
    operands = {name: fenced(one) for name, one in make_operands(small_cut, 41, OPTIONS).items()}
    expected = in_float64(**operands).to(BF16)
    # The result is in such memory too.
    out = fenced(torch.full_like(expected, torch.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: out)
    with kernels.running():
        assert calls.map_channels(**operands) is out
    assert same_bits([out], [expected])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_stay_where_they_are(kernels, small_cut, bad):
    operands = {name: one.to(kernels.device) for name, one in make_operands(small_cut, 100, OPTIONS).items()}
    operands["mask"][60] = 1
    with kernels.running():
        usual = calls.map_channels(**operands)
        for name, columns in (("first", slice(None)), ("addend", slice(17, 18))):
            worse = operands | {name: operands[name].clone()}
            worse[name][60, 17] = bad
            is_bad = torch.zeros_like(usual, dtype=torch.bool)
            is_bad[60, columns] = True
            found = calls.map_channels(**worse)
            assert torch.equal(found[~is_bad], usual[~is_bad])
            assert not found[60, 17].isfinite()
            # Nothing comes through where the mask is not positive.
            worse["mask"] = operands["mask"].clone()
            worse["mask"][60, ::2], worse["mask"][60, 1::2] = 0, torch.nan
            assert not calls.map_channels(**worse)[60].any()


def test_compiled_ahead(planned, monkeypatch):
    """From the shapes of meta tensors alone, the kernels that are launched later."""
    compiled = []
    monkeypatch.setattr(launching, "compile_all", lambda kernels, _: compiled.extend(kernels))
    monkeypatch.setattr(launching, "architecture_of", lambda device: "sm_90")
    for key in CUTS:
        planned.launched.clear()
        compiled.clear()
        operands = make_operands(key, 20, use_of(key))
        calls.map_channels(**operands)
        meta = {name: one.to("meta") for name, one in operands.items()}
        calls.compile_ahead(torch.device("cuda", 0), lambda meta=meta: calls.map_channels(**meta))
        assert compiled == [plan.kernel for plan in planned.launched]
        assert [kernel.entry for kernel in compiled] == ["map_channels"]


# --- Where it is the plan.


def plan_of(machine, pixels, key, dtype=BF16):
    return plan_channel_map(machine, dtype, pixels, *key, **{name: name in use_of(key) for name in OPTIONS})


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("key", CUTS, ids=str)
def test_plans(name, key):
    machine, cut = MACHINES[name], CUTS[key]
    for pixels in (0, 1, 1000, 32_768, 802_816):
        plan = plan_of(machine, pixels, key)
        if plan is None:
            assert name == "RTX 4090"
            continue
        constants = dict(plan.kernel.constants)
        blocks, (pieces, along) = constants["BLOCKS"], plan.grid
        assert along * cut.columns == key[2]
        assert plan.threads == 32 * cut.warps
        assert plan.shared_bytes <= machine.shared_memory
        assert blocks * (plan.shared_bytes + 1024) <= machine.shared_memory_in_all
        assert name == "RTX 4090" or blocks == cut.blocks
        assert 1 <= pieces <= max(1, -(-pixels // cut.length))  # no block without pixels
        assert pieces <= machine.multiprocessors * blocks // along  # all of them at once
        if pixels == 802_816:
            assert pieces == machine.multiprocessors * blocks // along


def test_cards_with_less_shared_memory(monkeypatch):
    def planned_for(name, down):
        monkeypatch.setattr(plans, "CUTS", {(64, 0, 256): Cut(256, 1, 1, down, 3, 2)})
        plan_channel_map.cache_clear()
        plan = plan_of(MACHINES[name], 10_000, (64, 0, 256))
        return plan and tuple(dict(plan.kernel.constants)[name] for name in ("STAGES", "BLOCKS"))

    assert planned_for("H200", 32) == (3, 2)
    assert planned_for("A100", 32) == (2, 2)  # rather fewer stages than blocks
    assert planned_for("RTX 4090", 32) == (2, 1)
    assert planned_for("RTX 4090", 64) is None


def test_what_is_refused(planned):
    key = next(key for key in CUTS if key[1])
    operands = make_operands(key, 20, OPTIONS)
    assert calls.map_channels(**operands) is not None

    def takes(**others):
        return calls.map_channels(**operands | others) is not None

    assert takes(level=None, addend=None, mask=None)
    assert not takes(relu=True)  # not with these channels
    assert calls.map_channels(**{name: one.float() for name, one in operands.items()}) is None
    for name in operands:
        assert not takes(**{name: operands[name].half()})
    first, second = operands["first"], operands["second"]
    assert not takes(second=None, second_weight=None)  # not in the table
    assert not takes(first=first[:, 8:])
    for name in ("first", "weight", "second", "second_weight", "addend", "mask"):
        assert not takes(**{name: operands[name].T.contiguous().T})
    for name, one in (("first", first), ("second", second)):
        for move, extra in ((4, 8), (8, 12)):  # an address, and a distance, that is no multiple of 16 bytes
            wide = torch.zeros(20, one.shape[1] + extra, dtype=BF16)
            assert not takes(**{name: wide[:, move : move + one.shape[1]]})
    assert plan_of(planned.machine, 2**31, key) is None


# --- On a GPU: the networks' shapes.

SHAPES = [
    (802_816, 64, 0, 256), (200_704, 128, 0, 512), (50_176, 256, 0, 1024), (32_769, 256, 0, 1024),
    (802_816, 256, 64, 64), (200_704, 512, 128, 128), (131_073, 512, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize(("pixels", "first", "second", "columns"), SHAPES, ids=str)
def test_large_maps_on_gpu(gpu, pixels, first, second, columns):
    key = (first, second, columns)
    if plan_of(launching.machine(torch.device("cuda", 0)), pixels, key) is None:
        pytest.skip("cuBLAS has these")
    torch.manual_seed(0)
    operands = {
        name: torch.randn(one.shape, device="cuda").to(BF16)
        for name, one in make_operands(key, pixels, use_of(key)).items()
    }
    results = []
    with gpu.running():
        for early in (False, True, False):
            with dependent_launches(early):
                results.append(calls.map_channels(**operands))
        torch.cuda.synchronize()
    found = results[0]
    assert all(same_bits([found], [other]) for other in results[1:])
    large = {name: one.split(2**16) for name, one in operands.items() if one.shape[0] == pixels}
    for number, piece in enumerate(found.split(2**16)):
        expected = in_float64(**operands | {name: pieces[number] for name, pieces in large.items()})
        assert ((piece - expected).abs() <= 2**-8 * expected.abs() + 1e-4 * expected.abs().max()).all()
