"""Every way to cut the lines of a map into blocks, timed: what `gsanet.functional.fused.plan.lines` should choose.

    python benchmarks/plans.py --maps 56x56x64 28x28x128 --batch 256
    python benchmarks/plans.py --registers --maps 56x56x64 28x28x128 14x14x256 32x32x64x512 16x16x128x512
    python benchmarks/plans.py --projection --maps 56x56x64 56x56x128 28x28x128 32x32x64x512 16x16x128x512
    python benchmarks/plans.py --products
    python benchmarks/plans.py --gradients
    python benchmarks/plans.py --maps-of-channels

For each map and each kernel it prints the time of the plan in use, and of the faster ones among all that fit. A cut is
heads x lines of a block, then warps of a block, then blocks on a multiprocessor. With `--registers` forward kernels
also come with scores in registers, in cuts of their own that spill little (in brackets, in bytes of a thread). With
`--projection` it is about the projection and the context vectors instead, in two kernels or in one (`projections.py`),
and compares their results.
With `--products` it is about sums over pixels of products of channels (`pixel_products.py`), at the networks' shapes,
with `--gradients` about both gradients of a projection in one kernel (`projection_gradients.py`), and with
`--maps-of-channels` about linear maps of each pixel's channels with what is behind them (`channel_maps.py`).
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import channel_maps
import pixel_products
import projection_gradients
import torch
from measure import Graphed
from projections import compare
from torch import Tensor

from gsanet.bench import milliseconds, one_line
from gsanet.functional.fused import calls
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.compiler import architecture_of, compile_all
from gsanet.functional.fused.plan import Launch, bundle_of
from gsanet.functional.fused.plan import lines as line_plans

HEADS = 8
# The kernels that a plan cuts; "line" is the only one of a module with one axis.
LINES = ("column", "row", "row's gradient", "column's gradient", "line", "line's gradient")
MOST_SPILLED = 64  # bytes of a thread, of kernels with scores in registers
Cut = tuple[int, int, int, int]
Run = Callable[[], object]


def kernels(height: int, width: int, channels: int, batch: int, pool: bool) -> dict[str, Run]:
    """The kernels of a module in training, as functions to call: with both axes, and with rows only."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    size = (batch, height, width, HEADS, channels // HEADS)
    # As the module has them: q, k and v beside each other, so that pixels are 3 channels apart.
    q, k, v = random(*size[:3], 3 * channels).unflatten(3, (3 * HEADS, -1)).split(HEADS, 3)
    d_q, d_k, d_v = torch.empty_like(random(*size[:3], 3 * channels)).unflatten(3, (3 * HEADS, -1)).split(HEADS, 3)
    column, d_column = random(*size), random(*size)
    d_out = random(batch, height // (1 + pool), width // (1 + pool), *size[3:])
    column_table, row_table = random(2 * height - 1, size[4]), random(2 * width - 1, size[4])
    applied = torch.rand(5, channels, device="cuda")
    vectors = calls.context_vectors(k, v)
    gradient, turned, offset = calls.context_gradient(q, d_out, vectors, pool)
    content = calls.ContentGradient(k, d_k, gradient, turned, vectors.key_max, offset)
    return {
        "column": lambda: calls.attend(q, v, column_table, "column", centre=applied[2]),
        "row": lambda: calls.attend(q, column, row_table, "row", norm=applied, context=vectors.turned, pool=pool),
        "row's gradient": lambda: calls.attend_gradient(
            q, column, row_table, d_out, "row", d_q, d_column,
            norm=applied, moments=applied[2:4], context=vectors.context, pool=pool,
        ),
        "column's gradient": lambda: calls.attend_gradient(
            q, v, column_table, d_column, "column", d_q, d_v,
            accumulate=True, coefficients=applied, normalised=column, content=content,
        ),
        "line": lambda: calls.attend(q, v, row_table, "row", context=vectors.turned, pool=pool),
        "line's gradient": lambda: calls.attend_gradient(
            q, v, row_table, d_out, "row", d_q, d_v, context=vectors.context, content=content, pool=pool
        ),
        "context vectors": lambda: calls.context_vectors(k, v),
        "their gradient": lambda: calls.context_gradient(q, d_out, vectors, pool),
    }  # fmt: skip


def cuts(backward: bool, length: int) -> Iterator[Cut]:
    """All that the kernels' sources allow, whether they fit or not."""
    if length <= 8:
        shares = [(heads, 8 // heads * bundle_of(length)) for heads in (8, 4, 2, 1)]
        loads = [(8, blocks) for blocks in (range(1, 5) if backward else range(2, 7))]
    else:
        shares = [
            (heads, lines) for heads, lines in itertools.product((8, 4, 2), (1, 2, 4, 8)) if heads * lines in (8, 16)
        ]
        loads = [(8, 1), (8, 2), (8, 3), (8, 4), (16, 1)] if backward else [(8, 2), (8, 3), (8, 4)]
    for share, load in itertools.product(shares, loads):
        yield *share, *load


@contextmanager
def forced(cut: Cut) -> Iterator[None]:
    """Plans of this cut and no other; more blocks than fit count as none."""
    heads, lines, warps, blocks = cut

    def choose(*arguments: Any, whole: bool = True) -> tuple[int, int] | None:
        fitting = arguments[2] if len(arguments) == 3 else arguments[3]
        return (warps, blocks) if blocks <= fitting else None

    def share(*_: Any) -> list[tuple[int, int]]:
        return [(heads, lines)]

    line_plans.plan_line.cache_clear()
    with (
        mock.patch.multiple(line_plans, _cuts=share, _backward_warps=choose, _forward_warps=choose),
        mock.patch.multiple(line_plans, _bundled_cuts=share, _bundled_warps=choose),
        mock.patch.multiple(line_plans, _in_registers=lambda *_: [], _faster=lambda *_: None),
    ):
        yield
    line_plans.plan_line.cache_clear()


def cuts_in_registers(pool: bool) -> Iterator[Cut]:
    """Cuts of forward kernels with scores in registers, whether they fit or not."""
    shares = [(8, 2), (4, 4), (4, 2)] if pool else [(8, 1), (8, 2), (4, 2), (4, 4)]
    for (heads, lines), warps in itertools.product(shares, (4, 8)):
        for blocks in range(2, 7 if warps == 4 else 4):
            yield heads, lines, warps, blocks


@contextmanager
def forced_in_registers(cut: Cut) -> Iterator[None]:
    """Plans of kernels with scores in registers, of this cut if it fits."""
    heads, lines, warps, blocks = cut
    line_plans.plan_line.cache_clear()
    with mock.patch.multiple(
        line_plans,
        _in_registers=lambda *_: [(heads * lines, warps, blocks)],
        _cuts=lambda *_: [(heads, lines)],
    ):
        yield
    line_plans.plan_line.cache_clear()


def find_in_registers(run: Run, pool: bool, device: torch.device) -> dict[str, Cut]:
    """The cuts with scores in registers that fit a call, and spill little."""
    found: dict[Cut, Launch] = {}
    for cut in cuts_in_registers(pool):
        with forced_in_registers(cut):
            launch = planned(run)
        wanted = dict(zip(("HEADS", "LINES", "WARPS", "BLOCKS", "IN_REGISTERS"), (*cut, 1), strict=True))
        if launch is not None and wanted.items() <= dict(launch.kernel.constants).items():
            found[cut] = launch
    binaries = compile_all((launch.kernel for launch in found.values()), architecture_of(device))
    named: dict[str, Cut] = {}
    for cut, launch in found.items():
        heads, lines, warps, blocks = cut
        spilled = max(binaries[launch.kernel].spill_stores, binaries[launch.kernel].spill_loads)
        if spilled <= MOST_SPILLED:
            named[f"in registers {heads} x {lines}, {warps} warps, {blocks} blocks ({spilled})"] = cut
    return named


def planned(run: Run) -> Launch | None:
    """The line kernel that a call would launch, or None if nothing fits."""
    launches: list[Launch] = []
    with mock.patch.object(launching, "launch", lambda launch, *_: launches.append(launch)):
        try:
            run()
        except AssertionError:  # there is no plan
            return None
    return launches[0]


def main() -> None:
    """Time all cuts of all kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--maps",
        nargs="+",
        default=["56x56x64", "28x28x128", "14x14x256", "7x7x512"],
        help="height x width x channels; a fourth number is the batch",
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pool", action="store_true", help="the module averages 2 x 2 pixels")
    parser.add_argument("--show", type=int, default=3, help="so many of the fastest; 0: only the plan in use")
    parser.add_argument("--registers", action="store_true", help="forward kernels with scores in registers too")
    parser.add_argument("--projection", action="store_true", help="the projection, for 64 and 128 channels")
    parser.add_argument("--products", action="store_true", help="sums over pixels of products of channels")
    parser.add_argument("--gradients", action="store_true", help="both gradients of a projection of 64 channels")
    parser.add_argument("--maps-of-channels", action="store_true", help="linear maps of each pixel's channels")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    for shape in pixel_products.SHAPES if options.products else ():
        pixel_products.compare(*shape, options.show > 0)
    for pixels in projection_gradients.PIXELS if options.gradients else ():
        projection_gradients.compare(pixels, options.show > 0)
    for entry in channel_maps.SHAPES if options.maps_of_channels else ():
        channel_maps.compare(*entry, options.show > 0)
    if options.products or options.gradients or options.maps_of_channels:
        return
    for text in options.maps:
        height, width, channels, batch = (*map(int, text.split("x")), options.batch)[:4]
        if options.projection:
            compare("x".join(text.split("x")[:3]), height, width, channels, batch, options.show)
            continue
        for name, run in kernels(height, width, channels, batch, options.pool).items():
            found: dict[Cut, Launch] = {}
            length = height if name.startswith("column") else width
            for cut in cuts("gradient" in name, length) if name in LINES and options.show else ():
                with forced(cut):
                    if (launch := planned(run)) is not None:
                        found[cut] = launch
            compile_all((launch.kernel for launch in found.values()), architecture_of(device))
            runs: dict[str, Run] = {"as planned": Graphed(run)}
            for cut in found:
                heads, lines, warps, blocks = cut
                runs[f"{heads} x {lines}, {warps} warps, {blocks} blocks"] = Graphed(partial(run_with, cut, run))
            if options.registers and name in ("column", "row", "line") and length > 8:
                for words, cut in find_in_registers(run, options.pool and name != "column", device).items():
                    runs[words] = Graphed(partial(run_in_registers, cut, run))
            times = milliseconds(runs, "cuda", 0.02, lambda side, error: print(f"  {side}: {one_line(error)}"))
            first = times.pop("as planned")
            in_registers = {side: time for side, time in times.items() if side.startswith("in registers")}
            ordinary = {side: time for side, time in times.items() if side not in in_registers}
            fastest = sorted(ordinary.items(), key=lambda item: item[1])[: options.show]
            fastest += sorted(in_registers.items(), key=lambda item: item[1])
            others = "".join(f"; {cut}: {1e3 * time:.0f}" for cut, time in fastest)
            print(f"{text}, {name}: {1e3 * first:.0f} us as planned{others}", flush=True)


def run_with(cut: Cut, run: Run) -> None:
    """A call with the plan of a cut."""
    with forced(cut):
        run()


def run_in_registers(cut: Cut, run: Run) -> None:
    """The same with scores in registers."""
    with forced_in_registers(cut):
        run()


if __name__ == "__main__":
    main()
