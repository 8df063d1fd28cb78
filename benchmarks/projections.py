"""The projection and the context vectors in one kernel, against a matrix product and a kernel: both timed and compared.

`python benchmarks/plans.py --projection` calls this; `gsanet.functional.fused.plan.projection` has what is chosen:
`ON_CHIP` where one kernel is the plan, and `CUTS` how its blocks work.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from measure import Graphed
from torch import Tensor

from gsanet.bench import milliseconds, one_line
from gsanet.functional.fused import calls
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.compiler import architecture_of, compile_all
from gsanet.functional.fused.plan import Launch, plan_projection
from gsanet.functional.fused.plan import projection as projection_plans
from gsanet.functional.fused.plan.projection import CUTS, Cut
from gsanet.functional.fused.projection import project, split

HEADS = 8


def in_two_kernels(x: Tensor, weight: Tensor) -> calls.Projected:
    """As everywhere where one kernel is not the plan."""
    maps = x.permute(0, 3, 1, 2)
    q, k, v = split(project(maps, weight), maps, HEADS, x.shape[3], content=True)
    assert k is not None
    return calls.Projected(q, v, calls.context_vectors(k, v))


def in_one_kernel(x: Tensor, weight: Tensor, cut: Cut) -> calls.Projected:
    """The same, whatever the plan is."""
    with forced(x.shape[3], cut):
        found = calls.project_with_context(x, weight, HEADS)
    if found is None:
        raise ValueError("there is no plan for this cut")
    return found


@contextmanager
def forced(channels: int, cut: Cut) -> Iterator[None]:
    """Plans of this cut, for maps of any size."""
    plan_projection.cache_clear()
    with mock.patch.multiple(projection_plans, ON_CHIP={channels: range(1, 2**31)}, CUTS={channels: cut}):
        yield
    plan_projection.cache_clear()


def cuts(channels: int) -> Iterator[Cut]:
    """Those that are worth a try: with more blocks their registers would not do."""
    loads = [(4, 1, 4), (8, 1, 2), (8, 2, 1)] if channels == 64 else [(8, 1, 1), (8, 2, 1)]
    for length, (warps, steps, blocks) in itertools.product((64, 128, 192), loads):
        yield Cut(length, steps, warps, blocks)


def launched(run: Callable[[], object]) -> list[Launch]:
    """What a call would launch."""
    launches: list[Launch] = []
    with mock.patch.object(launching, "launch", lambda launch, *_: launches.append(launch)):
        run()
    return launches


def difference(value: Tensor, other: Tensor) -> float:
    """The largest, by the largest value."""
    return ((value.double() - other.double()).abs().max() / other.double().abs().max()).item()


def compare(text: str, height: int, width: int, channels: int, batch: int, show: int) -> None:
    """Time both ways at one shape, print the times and how far the results are apart."""
    torch.manual_seed(0)
    x = torch.randn(batch, height, width, channels, device="cuda").bfloat16()
    weight = (torch.randn(3 * channels, channels, device="cuda") / channels**0.5).bfloat16()
    table = torch.randn(2 * height - 1, channels // HEADS, device="cuda").bfloat16()
    chosen = CUTS[channels]
    runs = {cut: partial(in_one_kernel, x, weight, cut) for cut in (chosen, *(cuts(channels) if show else ()))}
    kernels = [launch.kernel for run in runs.values() for launch in launched(run)]
    compile_all(kernels, architecture_of(torch.device("cuda", 0)))
    one, two = runs[chosen](), in_two_kernels(x, weight)
    names = ("q", "v", "context vectors", "the same turned", "largest keys", "1 / sums")
    pairs = zip(names, (one.q, one.v, *one.vectors), (two.q, two.v, *two.vectors), strict=True)
    apart = ", ".join(f"{name} {difference(value, other):.1e}" for name, value, other in pairs)
    again = runs[chosen]()
    repeats = all(map(torch.equal, (one.q, one.v, *one.vectors), (again.q, again.v, *again.vectors)))
    sides = {
        "two": Graphed(lambda: in_two_kernels(x, weight)),
        "product": Graphed(lambda: project(x.permute(0, 3, 1, 2), weight)),
        "columns behind two": Graphed(lambda: calls.attend(two.q, two.v, table, "column")),
        "columns behind one": Graphed(lambda: calls.attend(one.q, one.v, table, "column")),
        **{_name(cut): Graphed(run) for cut, run in runs.items()},
    }
    times = milliseconds(sides, "cuda", 0.05, lambda side, error: print(f"  {side}: {one_line(error)}"))
    usual = {name: 1e3 * times.pop(name) for name in list(sides)[:4]}
    planned = 1e3 * times.pop(_name(chosen))
    fastest = sorted(times.items(), key=lambda item: item[1])[:show]
    others = "".join(f"; {name}: {1e3 * time:.0f}" for name, time in fastest)
    plan = plan_projection(launching.machine(x.device), calls.shape_of(one.q, one.v), height * width, batch)
    print(
        f"{text}, {batch} images: {usual['two']:.0f} us in two kernels, of which {usual['product']:.0f} the product; "
        f"{planned:.0f} in one ({_name(chosen)}), {usual['two'] / planned:.2f} times faster{others}"
    )
    behind = [f"{usual[f'columns behind {number}']:.0f}" for number in ("two", "one")]
    print(f"  columns behind it: {behind[0]} us behind two kernels, {behind[1]} behind one")
    print(f"  plan: {'two kernels' if plan is None else 'one kernel'}; two runs give the same bits: {repeats}")
    print(f"  largest differences: {apart}", flush=True)


def _name(cut: Cut) -> str:
    return f"{cut.length} pixels, {16 * cut.steps} a warp, {cut.warps} warps, {cut.blocks} blocks"
