"""The kernels of local attention against its loops in float64: outputs and gradients.

As in `test_kernels`, each test runs the kernels' own source on the host stand-in and, where there is one, on a GPU.
"""

import pytest
import torch
from functional.fused.test_instantiations import MACHINES
from functional.fused.test_kernels import BF16, FLOAT, HALF, normal, same_bits
from functional.test_local import CASES
from helpers import gradients, relative_error

from gsanet.functional import use_backend
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.local import LARGEST, WIDEST
from gsanet.functional.fused.plan import maps, plan_local
from gsanet.functional.local_ops import local_mix, local_scores, local_spread

TOLERANCES = {FLOAT: 2e-6, BF16: 6e-3, HALF: 1e-3}


def leaf(kernels, dtype, *shape, seed):
    return normal(*shape, dtype=dtype, seed=seed).to(kernels.device).requires_grad_()


def check(kernels, operator, first, second, *options):
    """The operator's output and its gradients."""
    with kernels.running():
        out = operator(first, second, *options)
        found = [out, *gradients(out, (first, second))]
    assert operator._name.split("::")[-1] in kernels.entries
    exact = [one.detach().double().cpu().requires_grad_() for one in (first, second)]
    expected = operator(*exact, *options)  # float64 goes by loops
    for mine, theirs in zip(found, [expected, *gradients(expected, exact)], strict=True):
        assert mine.dtype == first.dtype
        assert relative_error(mine.double().cpu(), theirs) < TOLERANCES[first.dtype]
    return found


@pytest.mark.parametrize(("dtype", "channels"), [(FLOAT, 2), (FLOAT, 8), (BF16, 8), (BF16, 13), (HALF, 8)], ids=str)
@pytest.mark.parametrize(("inner", "outer", "window", "stride", "padding"), CASES)
def test_the_operators(kernels, inner, outer, window, stride, padding, channels, dtype):
    options = (window, stride, padding)
    q = leaf(kernels, dtype, 2, *inner, 3, channels, seed=1)
    k = leaf(kernels, dtype, 2, *outer, 3, channels, seed=2)
    weights = leaf(kernels, dtype, 2, *inner, 3, window**2, seed=3)
    check(kernels, local_scores, q, k, *options)
    check(kernels, local_mix, weights, k, *options)
    check(kernels, local_spread, weights, q, *outer, *options)
    assert kernels.entries == {"local_scores", "local_mix", "local_spread"}


def test_more_pixels_than_a_block_has_threads(kernels):
    q, k, v = (leaf(kernels, BF16, 2, 9, 8, 4, 16, seed=seed) for seed in range(3))
    scores, *_ = check(kernels, local_scores, q, k, 5, 1, 2)
    weights = scores.detach().softmax(-1).requires_grad_()
    first = check(kernels, local_mix, weights, v, 5, 1, 2)
    for _ in kernels.other_orders():
        assert same_bits(first, check(kernels, local_mix, weights, v, 5, 1, 2))


def test_rows_and_heads_of_several_blocks(kernels, monkeypatch):
    """What spreads has parts of rows and of heads, and what mixes a row of the window at a time."""
    monkeypatch.setattr(maps, "LOCAL_THREADS", 64)
    monkeypatch.setattr(maps, "LOCAL_SHARED", 1)
    weights = leaf(kernels, BF16, 2, 4, 11, 6, 25, seed=1)
    q = leaf(kernels, BF16, 2, 4, 11, 6, 32, seed=2)
    check(kernels, local_spread, weights, q, 4, 11, 5, 1, 2)
    check(kernels, local_mix, weights, q, 5, 1, 2)
    assert {plan.grid[1] for plan in kernels.launched if plan.kernel.entry == "local_spread"} == {3}
    assert {constants["PIXELS"] for constants in kernels.constants("local_spread")} == {8}
    assert {constants["ROWS"] for constants in kernels.constants("local_mix")} == {1}


def test_parts_of_one_projection(kernels):
    """As the modules have them: q, k and v beside each other, and gradients with strides of their own."""
    parts = leaf(kernels, BF16, 2, 6, 5, 3 * 32, seed=4)
    q, k, v = (part.unflatten(-1, (4, 8)) for part in parts.split(32, dim=-1))
    with kernels.running():
        out = local_mix(local_scores(q, k, 3, 1, 1), v, 3, 1, 1).permute(0, 3, 4, 1, 2)
        (found,) = torch.autograd.grad(out, parts, torch.ones_like(out))
    exact = parts.detach().double().cpu().requires_grad_()
    q, k, v = (part.unflatten(-1, (4, 8)) for part in exact.split(32, dim=-1))
    (expected,) = torch.autograd.grad(local_mix(local_scores(q, k, 3, 1, 1), v, 3, 1, 1).sum(), exact)
    assert relative_error(found.double().cpu(), expected) < 2e-2


def test_what_goes_by_loops(kernels):
    q, k = (leaf(kernels, FLOAT, 1, 4, 4, 2, 8, seed=seed) for seed in range(2))
    wide = leaf(kernels, FLOAT, 1, 4, 4, 1, 130, seed=1)
    with kernels.running():
        local_scores(q.detach().double(), k.detach().double(), 3, 1, 1)
        local_scores(wide, wide, 3, 1, 1)
        local_scores(q[:0], k[:0], 3, 1, 1)
    with use_backend("torch"):
        local_scores(q, k, 3, 1, 1)
    assert not kernels.launched


def test_what_does_not_fit_together_is_refused(kernels):
    """As without the kernels, which would read what is not there."""
    q, weights = leaf(kernels, FLOAT, 1, 4, 4, 2, 8, seed=1), leaf(kernels, FLOAT, 1, 4, 4, 2, 9, seed=2)
    for wrong in (
        lambda: local_scores(q, leaf(kernels, FLOAT, 1, 4, 4, 2, 16, seed=3), 3, 1, 1),
        lambda: local_mix(weights, leaf(kernels, FLOAT, 2, 4, 4, 2, 8, seed=3), 3, 1, 1),
        lambda: local_mix(weights, leaf(kernels, FLOAT, 1, 4, 4, 3, 8, seed=3), 3, 1, 1),
    ):
        with kernels.running(), pytest.raises(RuntimeError, match="match"):
            wrong()
    with kernels.running():
        local_spread(weights, leaf(kernels, FLOAT, 1, 5, 4, 2, 8, seed=3), 4, 4, 3, 1, 1)  # a row too many: not used
    assert not kernels.launched


@pytest.mark.parametrize("window", [1, 7, LARGEST])
@pytest.mark.parametrize("entry", ["local_scores", "local_mix", "local_spread"])
def test_any_machine_has_room(entry, window):
    plan = plan_local(entry, FLOAT, (8, 28, 28), 8, WIDEST, window, True)
    assert plan.shared_bytes <= 99 * 1024
    assert plan.threads == 32 * dict(plan.kernel.constants)["WARPS"]


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("architecture", MACHINES)
def test_the_kernels_of_the_networks_compile(architecture):
    """Of stand-alone attention and of LR-Net, at the narrowest and the widest."""
    sizes = {(32, 8): (8, True), (4, 64): (8, True), (8, 8): (64, True), (16, 16): (2, False)}
    plans = [
        plan_local(entry, FLOAT if channels == 2 else BF16, (512, width, width), heads, channels, 7, vector)
        for entry in ("local_scores", "local_mix", "local_spread")
        for (width, heads), (channels, vector) in sizes.items()
    ]
    assert all(128 <= plan.threads <= 256 and plan.shared_bytes < 49152 for plan in plans)
    for binary in compile_all([plan.kernel for plan in plans], architecture).values():
        assert binary.spill_stores == 0
