"""Linear maps of each pixel's channels, with what is behind them, against products of PyTorch: timed and compared.

`python benchmarks/plans.py --maps-of-channels` calls this; `CUTS` of `gsanet.functional.fused.plan.channel_map` says
where our kernel is the plan, and how its blocks work. There are three uses: the gradient of a residual block's first
convolution with the sum and the mask behind it, the sum of two products in the gradient of the last one, and that one
itself with the sum and the ReLU behind it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from cuts import print_cuts, print_usual, time_cuts, worth_trying
from projections import difference
from torch import Tensor

from gsanet.functional.convolution import fused_convolution_relu
from gsanet.functional.fused import calls
from gsanet.functional.fused.plan import channel_map, plan_channel_map
from gsanet.functional.fused.plan.channel_map import CUTS, Cut

Key = tuple[int, int, int]  # as in CUTS

# Pixels, channels of the first map, the second and the output, and whether a ReLU follows. Batches of 256 at 224x224,
# and of 512 at 64x64.
SHAPES = [
    (802_816, 64, 0, 256, False), (200_704, 128, 0, 512, False), (50_176, 256, 0, 1024, False),
    (524_288, 64, 0, 256, False), (131_072, 128, 0, 512, False), (32_768, 256, 0, 1024, False),
    (802_816, 256, 64, 64, False), (200_704, 512, 128, 128, False), (200_704, 512, 256, 256, False),
    (524_288, 256, 64, 64, False), (131_072, 512, 128, 128, False),
    (802_816, 64, 0, 256, True), (200_704, 128, 0, 512, True), (50_176, 256, 0, 1024, True),
    (524_288, 64, 0, 256, True), (131_072, 128, 0, 512, True),
]  # fmt: skip

# What is worth a try: with more warps, or larger parts of the sum, registers would not do.
TRIED: dict[Key, list[Cut]] = {
    (64, 0, 256): [
        Cut(256, parts=1, sets=1, down=32, stages=3, blocks=2),
        Cut(256, parts=1, sets=1, down=16, stages=6, blocks=2),
        Cut(256, parts=1, sets=1, down=16, stages=4, blocks=3),
        Cut(256, parts=1, sets=1, down=64, stages=3, blocks=1),
        Cut(256, parts=1, sets=2, down=32, stages=3, blocks=1),
        Cut(128, parts=1, sets=1, down=32, stages=2, blocks=4),
    ],
    (128, 0, 512): [
        Cut(256, parts=1, sets=1, down=32, stages=5, blocks=1),
        Cut(256, parts=1, sets=1, down=32, stages=2, blocks=2),
        Cut(256, parts=1, sets=1, down=16, stages=5, blocks=2),
        Cut(256, parts=1, sets=1, down=64, stages=2, blocks=1),
        Cut(128, parts=1, sets=1, down=32, stages=4, blocks=2),
        Cut(512, parts=1, sets=1, down=32, stages=3, blocks=1),
        Cut(512, parts=1, sets=1, down=16, stages=6, blocks=1),
    ],
    (256, 0, 1024): [
        Cut(256, parts=1, sets=1, down=32, stages=4, blocks=1),
        Cut(256, parts=1, sets=1, down=16, stages=8, blocks=1),
        Cut(256, parts=1, sets=1, down=64, stages=2, blocks=1),
        Cut(256, parts=2, sets=1, down=32, stages=3, blocks=1),
        Cut(128, parts=1, sets=1, down=32, stages=3, blocks=2),
        Cut(128, parts=1, sets=2, down=32, stages=3, blocks=1),
    ],
    (256, 64, 64): [
        Cut(64, parts=1, sets=2, down=16, stages=4, blocks=2),
        Cut(64, parts=1, sets=4, down=16, stages=4, blocks=1),
        Cut(64, parts=1, sets=2, down=32, stages=2, blocks=2),
        Cut(64, parts=2, sets=1, down=32, stages=4, blocks=2),
        Cut(64, parts=4, sets=1, down=64, stages=4, blocks=1),
    ],
    (512, 128, 128): [
        Cut(128, parts=2, sets=1, down=32, stages=4, blocks=1),
        Cut(128, parts=2, sets=1, down=64, stages=2, blocks=1),
        Cut(64, parts=2, sets=2, down=32, stages=2, blocks=1),
    ],
    (512, 256, 256): [Cut(128, parts=2, sets=1, down=32, stages=4, blocks=1)],
}


def add_and_mask(product: Tensor, addend: Tensor, mask: Tensor) -> Tensor:
    """What torch.compile makes one kernel of."""
    return torch.where(mask > 0, product + addend, 0)


def in_float64(
    first: Tensor,
    weight: Tensor,
    second: Tensor | None = None,
    second_weight: Tensor | None = None,
    level: Tensor | None = None,
    addend: Tensor | None = None,
    mask: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """What `calls.map_channels` computes."""
    out = first.double() @ weight.double()
    if second is not None and second_weight is not None:
        out += second.double() @ second_weight.double()
    for more in (level, addend):
        if more is not None:
            out += more.double()
    out = out if mask is None else torch.where(mask > 0, out, 0)
    return out.relu() if relu else out


def by_kernel(operands: Mapping[str, Tensor], relu: bool, key: Key, cut: Cut) -> Tensor:
    """With this cut, whatever the plan is."""
    with forced(key, cut):
        found = calls.map_channels(**operands, relu=relu)
    if found is None:
        raise ValueError("there is no plan for this cut")
    return found


@contextmanager
def forced(key: Key, cut: Cut) -> Iterator[None]:
    """Plans of this cut."""
    plan_channel_map.cache_clear()
    with mock.patch.multiple(channel_map, CUTS={key: cut}, RELUS={(key[0], key[2])}):
        yield
    plan_channel_map.cache_clear()


def compare(pixels: int, first: int, second: int, columns: int, relu: bool, every: bool) -> None:
    """Time both ways at one shape, with a cold cache, print the times and how far the results are from exact ones.

    Args:
        pixels: Of all maps.
        first: Channels of the first map.
        second: Channels of the second; 0: it is the entry of a block, or its end.
        columns: Channels of the output.
        relu: It is the end.
        every: Every cut that is worth a try, and not only the planned one.
    """
    torch.manual_seed(0)
    key = (first, second, columns)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    x, weight = random(pixels, first), random(first, columns)
    operands = {"first": x, "weight": weight}
    usual: dict[str, Callable[[], Tensor]]
    if second:
        z, square, level = random(pixels, second), random(second, columns), random(columns)
        operands |= {"second": z, "second_weight": square, "level": level}
        usual = {"two products": lambda: torch.addmm(level, z, square).addmm_(x, weight)}
    elif relu:
        level, addend = random(columns), random(pixels, columns)
        operands |= {"level": level, "addend": addend}
        # Maps of one row of pixels, channels-last, for cuDNN.
        map_in, map_out = (one.T[None, :, None] for one in (x, addend))
        kernel, strides = weight.T[:, :, None, None].contiguous(), ((1, 1), (0, 0), (1, 1))
        usual = {"cuDNN": lambda: fused_convolution_relu(map_in, kernel, level, map_out, *strides)[0, :, 0].T}
    else:
        addend, mask = random(pixels, columns), random(pixels, columns).relu()
        operands |= {"addend": addend, "mask": mask}
        product, joined = x @ weight, torch.compile(add_and_mask, dynamic=True)
        usual = {"product": lambda: x @ weight, "sum and mask": lambda: joined(product, addend, mask)}
    maps = {name: one for name, one in operands.items() if one.shape[0] == pixels}
    planned = CUTS.get(key)
    cuts = worth_trying(planned, TRIED[key], every)
    runs = {cut: partial(by_kernel, operands, relu, key, cut) for cut in cuts}
    before, times = time_cuts(usual, runs)
    what = f"{pixels} pixels, {first} and {second} to {columns} channels{', ReLU' * relu}"
    total = print_usual(what, before, 2 * (pixels * columns + sum(one.numel() for one in maps.values())))
    print_cuts(times, total, planned)
    few = slice(0, 2**16)  # of the pixels
    expected = in_float64(**operands | {name: one[few] for name, one in maps.items()}, relu=relu)
    worst, repeats = 0.0, True
    for run in runs.values():
        one = run()
        repeats &= torch.equal(one, run())
        worst = max(worst, difference(one[few], expected))
    last = list(usual.values())[-1]()
    print(
        f"  largest differences from float64: PyTorch's {difference(last[few], expected):.0e}, ours, of any cut, "
        f"{worst:.0e}; two runs give the same bits: {repeats}",
        flush=True,
    )
