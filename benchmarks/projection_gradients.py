"""Both gradients of a projection to q, k and v in one kernel, against two matrix products: timed and compared.

`python benchmarks/plans.py --gradients` calls this; `MAPPED` of `gsanet.functional.fused.plan.pixel_products` has how
the kernel's blocks work, and `gradients_wanted` of `gsanet.functional.fused.projection` whether it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from cuts import print_cuts, print_usual, time_cuts, worth_trying
from projections import difference
from torch import Tensor

from gsanet.functional.fused import calls
from gsanet.functional.fused.plan import pixel_products as product_plans
from gsanet.functional.fused.plan import plan_pixel_products
from gsanet.functional.fused.plan.pixel_products import MAPPED, Cut

CHANNELS, ROWS = 64, 192  # of the map, and of q, k and v
PIXELS = [802_816, 524_288]  # batches of 256 at 224x224, and of 512 at 64x64

TRIED = [
    Cut(192, 64, 32, 32, sets=1, length=96, stages=4, blocks=1),
    Cut(192, 64, 32, 32, sets=1, length=48, stages=6, blocks=1),
    Cut(192, 64, 64, 16, sets=1, length=96, stages=4, blocks=1),
    Cut(192, 64, 64, 32, sets=2, length=96, stages=4, blocks=1),
    Cut(192, 64, 16, 64, sets=1, length=96, stages=4, blocks=1),
]


def in_two_products(d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As everywhere where the kernel is not used."""
    return d_out @ weight, d_out.T @ x


def by_kernel(d_out: Tensor, x: Tensor, weight: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """The same with this cut."""
    with forced(cut):
        found = calls.pointwise_gradients(d_out, x, weight)
    if found is None:
        raise ValueError("there is no plan for this cut")
    return found


@contextmanager
def forced(cut: Cut) -> Iterator[None]:
    """Plans of this cut."""
    plan_pixel_products.cache_clear()
    with mock.patch.object(product_plans, "MAPPED", {(CHANNELS, ROWS): cut}):
        yield
    plan_pixel_products.cache_clear()


def compare(pixels: int, every: bool, device: str = "cuda") -> None:
    """Time both ways, with a cold cache, print the times and how far the results are from exact ones.

    Args:
        pixels: Of both maps.
        every: Every cut that is worth a try, and not only the planned one.
        device: Where the maps are.
    """
    torch.manual_seed(0)
    d_out, x, weight = (
        torch.randn(*shape, device=device).bfloat16()
        for shape in ((pixels, ROWS), (pixels, CHANNELS), (ROWS, CHANNELS))
    )
    planned = MAPPED.get((CHANNELS, ROWS))
    runs = {cut: partial(by_kernel, d_out, x, weight, cut) for cut in worth_trying(planned, TRIED, every)}
    usual, times = time_cuts({"of x": lambda: d_out @ weight, "of the weight": lambda: d_out.T @ x}, runs)
    what = f"{pixels} pixels, {CHANNELS} to {ROWS} channels"
    total = print_usual(what, usual, 2 * pixels * (ROWS + 2 * CHANNELS))
    print_cuts(times, total, planned)
    few = slice(0, 2**16)  # of the pixels
    pieces = zip(d_out.split(2**16), x.split(2**16), strict=True)
    d_weight = sum((one.double().T @ other.double() for one, other in pieces), torch.zeros((), device=device).double())
    expected = d_out[few].double() @ weight.double(), d_weight

    def apart(found: tuple[Tensor, Tensor]) -> list[float]:
        return [difference(found[0][few], expected[0]), difference(found[1], expected[1])]

    worst, repeats = [0.0, 0.0], True
    for run in runs.values():
        one = run()
        repeats &= all(map(torch.equal, one, run()))
        worst = list(map(max, worst, apart(one)))
    by_products = apart(in_two_products(d_out, x, weight))
    print(
        f"  largest differences from float64, of x and of the weight: PyTorch's {by_products[0]:.0e}, "
        f"{by_products[1]:.0e}; ours, of any cut, {worst[0]:.0e}, {worst[1]:.0e}; "
        f"two runs give the same bits: {repeats}",
        flush=True,
    )
