"""The projection of q, k and v together with the context vectors: `kernels/projection.cu`."""

import functools
from typing import NamedTuple

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.context import plan_combination
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape

# Where one kernel is the plan: by channels of a map, how many pixels it may have. Everywhere else a matrix product
# and the kernel of `plan_context` do the same; `python benchmarks/plans.py --projection` times both.
ON_CHIP = {64: range(256, 2**31), 128: range(256, 2**31)}


class Cut(NamedTuple):
    """How a block works: pixels at a time, groups of 16 pixels that a warp takes at once, warps, blocks at a time."""

    length: int
    steps: int
    warps: int
    blocks: int  # on a multiprocessor


# A warp keeps its rows of the weight in registers: 48 of them for 64 channels, and 96 for 128.
CUTS = {64: Cut(128, 1, 8, 2), 128: Cut(192, 2, 8, 1)}


class Projection(NamedTuple):
    """The kernel, and the one that combines pieces of an image if there are several, `left` by the first for each."""

    launches: tuple[Launch, ...]
    pieces: int
    left: int


@functools.cache
def plan_projection(machine: Machine, shape: Shape, pixels: int, images: int) -> Projection | None:
    """How a batch is projected, or None where one kernel is not the plan.

    It is not for few pixels in all: a block reads the whole weight before it begins, and is to have at least two
    stretches of pixels behind that.
    """
    channels = shape.heads * shape.key
    if pixels not in ON_CHIP.get(channels, ()) or not (shape.vector and shape.size == 2):
        return None
    if shape.key != shape.value or shape.key not in (8, 16):
        return None
    cut = CUTS[channels]
    sets = cut.warps * 16 // channels
    rows = cut.length + max(cut.length, 3 * channels)  # pixels, and where more of them will be, the weight
    left = 4 * sets * channels * (shape.value + 2)  # of an image, by its warps
    shared = rows * shape.odd_stride(channels) * shape.size + left
    slots = machine.multiprocessors * min(cut.blocks, machine.blocks_of(shared))
    if shared > machine.shared_memory or images * pixels < 2 * cut.length * slots:
        return None
    pieces = _pieces(images, -(-pixels // cut.length), slots)
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[shape.dtype],
        "LENGTH": cut.length,
        "KEY": shape.key,
        "VALUE": shape.value,
        "HEADS": shape.heads,
        "LINES": 1,
        "WARPS": cut.warps,
        "BLOCKS": cut.blocks,
        "VECTOR": True,
        "STEPS": cut.steps,
        "WHOLE": pieces == 1,
    }
    kernel = specialise("projection.cu", "project_with_context", **constants)
    items = images * pieces
    launches = [Launch(kernel, (min(items, slots), 1), 32 * cut.warps, shared)]
    if pieces > 1:
        launches.append(plan_combination(shape, images, softmax=True))
    return Projection(tuple(launches), pieces, pieces * sets)


def _pieces(images: int, stretches: int, slots: int) -> int:
    """Into how many pieces of so many stretches images are cut: those that are done first.

    Blocks take pieces in turns; to finish one takes about as long as a stretch.
    """

    def time(pieces: int) -> int:
        return -(-images * pieces // slots) * (-(-stretches // pieces) + 1)

    best = min(range(1, stretches + 1), key=time)
    return -(-stretches // -(-stretches // best))  # none is empty
