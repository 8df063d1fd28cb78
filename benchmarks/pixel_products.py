"""Sums over pixels of products of channels, and of channels, against a matrix product and sums: timed and compared.

`python benchmarks/plans.py --products` calls this; `CUTS` of `gsanet.functional.fused.plan.pixel_products` says where
our kernels are the plan, and how their blocks work.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from cuts import print_cuts, time_cuts, worth_trying
from projections import difference
from torch import Tensor

from gsanet.functional.fused import calls
from gsanet.functional.fused.plan import pixel_products as product_plans
from gsanet.functional.fused.plan import plan_pixel_products
from gsanet.functional.fused.plan.pixel_products import CUTS, Cut

Key = tuple[int, int, bool]  # as in CUTS

# Pixels, and channels of x and y; where these are as many x is y. Batches of 256 at 224x224, and of 512 at 64x64.
SHAPES = [
    (802_816, 64, 64), (802_816, 64, 256), (200_704, 128, 128), (200_704, 128, 512), (50_176, 256, 256),
    (50_176, 256, 1024), (200_704, 256, 256), (200_704, 256, 512),
    (524_288, 64, 64), (524_288, 64, 256), (131_072, 128, 128), (131_072, 128, 512), (32_768, 256, 256),
    (32_768, 256, 1024),
]  # fmt: skip

WIDE = [
    Cut(256, 128, 64, 64, sets=1, length=64, stages=3, blocks=1),
    Cut(256, 128, 64, 64, sets=1, length=32, stages=4, blocks=1),
    Cut(256, 128, 64, 64, sets=1, length=32, stages=6, blocks=1),
    Cut(256, 128, 64, 32, sets=1, length=32, stages=6, blocks=1),
    Cut(256, 128, 32, 64, sets=1, length=32, stages=6, blocks=1),
    Cut(128, 128, 64, 32, sets=1, length=32, stages=4, blocks=2),
    Cut(128, 128, 64, 64, sets=1, length=32, stages=4, blocks=2),
]
# What is worth a try: more warps, or larger units of them, would need more registers than there are.
TRIED: dict[Key, list[Cut]] = {
    (64, 64, True): [
        Cut(64, 64, 64, 64, sets=8, length=128, stages=4, blocks=2),
        Cut(64, 64, 64, 64, sets=8, length=128, stages=6, blocks=1),
        Cut(64, 64, 64, 64, sets=8, length=256, stages=2, blocks=2),
        Cut(64, 64, 64, 64, sets=4, length=64, stages=4, blocks=4),
        Cut(64, 64, 64, 64, sets=4, length=128, stages=4, blocks=2),
        Cut(64, 64, 32, 32, sets=4, length=128, stages=4, blocks=2),
    ],
    (64, 256, False): [
        Cut(256, 64, 64, 32, sets=1, length=32, stages=4, blocks=2),
        Cut(256, 64, 64, 32, sets=1, length=64, stages=2, blocks=2),
        Cut(256, 64, 64, 32, sets=1, length=64, stages=4, blocks=1),
        Cut(256, 64, 64, 64, sets=1, length=32, stages=4, blocks=2),
        Cut(256, 64, 64, 64, sets=2, length=64, stages=4, blocks=1),
        Cut(256, 64, 32, 64, sets=1, length=32, stages=4, blocks=2),
    ],
    (128, 128, True): [
        Cut(128, 128, 64, 64, sets=4, length=64, stages=4, blocks=1),
        Cut(128, 128, 64, 64, sets=4, length=128, stages=4, blocks=1),
        Cut(128, 128, 64, 64, sets=2, length=64, stages=4, blocks=2),
        Cut(128, 128, 32, 32, sets=1, length=64, stages=4, blocks=2),
        Cut(128, 128, 32, 32, sets=1, length=32, stages=4, blocks=3),
        Cut(128, 128, 32, 32, sets=2, length=64, stages=4, blocks=1),
    ],
    (128, 512, False): WIDE,
    (256, 256, True): [
        Cut(128, 128, 64, 64, sets=2, length=64, stages=3, blocks=1),
        Cut(128, 128, 64, 64, sets=2, length=32, stages=6, blocks=1),
        Cut(128, 128, 64, 32, sets=1, length=32, stages=6, blocks=2),
        Cut(128, 128, 64, 64, sets=1, length=32, stages=4, blocks=2),
    ],
    (256, 512, False): WIDE,
    (256, 1024, False): WIDE,
}


def by_pytorch(x: Tensor, y: Tensor) -> calls.PixelProducts:
    """As everywhere where our kernels are not the plan."""
    return calls.PixelProducts(product(x, y), y.sum(0, dtype=torch.float32))


def product(x: Tensor, y: Tensor) -> Tensor:
    """In float32."""
    return torch.mm(y.T, x, out_dtype=torch.float32)


def channel_sums(y: Tensor, centre: Tensor) -> Tensor:
    """By the kernel for statistics of norms, which adds squares too."""
    return calls.channel_sums(y.view(1, 1, *y.shape), centre)[:, 0].sum(0)


def by_kernels(x: Tensor, y: Tensor, cut: Cut) -> calls.PixelProducts:
    """The same with this cut, whatever the plan is."""
    with forced((x.shape[1], y.shape[1], x is y), cut):
        found = calls.pixel_products(x, y)
    if found is None:
        raise ValueError("there is no plan for this cut")
    return found


@contextmanager
def forced(key: Key, cut: Cut) -> Iterator[None]:
    """Plans of this cut."""
    plan_pixel_products.cache_clear()
    with mock.patch.object(product_plans, "CUTS", {key: cut}):
        yield
    plan_pixel_products.cache_clear()


def compare(pixels: int, columns: int, rows: int, every: bool) -> None:
    """Time both ways at one shape, with a cold cache, print the times and how far the results are from exact ones.

    Args:
        pixels: Of both maps.
        columns: Channels of x.
        rows: Channels of y.
        every: Every cut that is worth a try, and not only the planned one.
    """
    torch.manual_seed(0)
    key = (columns, rows, columns == rows)
    x = torch.randn(pixels, columns, device="cuda").relu().bfloat16()
    y = x if key[2] else torch.randn(pixels, rows, device="cuda").bfloat16()
    centre = torch.zeros(rows, device="cuda")
    planned = CUTS.get(key)
    runs = {cut: partial(by_kernels, x, y, cut) for cut in worth_trying(planned, TRIED[key], every)}
    ways: dict[str, Callable[[], object]] = {
        "product": lambda: product(x, y),
        "sums": lambda: y.sum(0, dtype=torch.float32),
        "channel sums": lambda: channel_sums(y, centre),
    }
    usual, times = time_cuts(ways, runs)
    total = usual["product"] + min(usual["sums"], usual["channel sums"])
    floor = 2 * pixels * (columns if x is y else columns + rows) / 4.2e6
    print(
        f"{pixels} pixels, {columns} and {rows} channels{', the same' if x is y else ''}: {total:.0f} us by PyTorch, "
        f"product {usual['product']:.0f}, sums {usual['sums']:.0f} or {usual['channel sums']:.0f}; bytes {floor:.0f}"
    )
    print_cuts(times, total, planned)
    _check(x, y, runs)


def _check(x: Tensor, y: Tensor, runs: Mapping[Cut, Callable[[], calls.PixelProducts]]) -> None:
    """How far all results are from those of float64, and whether two runs give the same bits."""
    pieces = zip(x.split(2**16), y.split(2**16), strict=True)
    products = sum(((b.double().T @ a.double()) for a, b in pieces), torch.zeros((), device=x.device).double())
    exact = calls.PixelProducts(products, y.double().sum(0))
    usual = by_pytorch(x, y)
    apart = [difference(*pair) for pair in zip(usual, exact, strict=True)]
    print(f"  largest differences from float64: PyTorch's {apart[0]:.0e}, sums {apart[1]:.0e}", end="")
    worst, repeats = [0.0, 0.0], True
    for run in runs.values():
        one, again = run(), run()
        repeats &= all(map(torch.equal, one, again))
        worst = [max(old, difference(*pair)) for old, pair in zip(worst, zip(one, exact, strict=True), strict=True)]
    print(
        f"; ours, of any cut, {worst[0]:.0e}, sums {worst[1]:.0e}; two runs give the same bits: {repeats}", flush=True
    )
