"""A linear map of each pixel's channels, with what is behind it: `kernels/channel_map.cu`."""

import functools
from typing import NamedTuple

import torch

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine

WARP_COLUMNS = 32


class Cut(NamedTuple):
    """How a block works.

    Args:
        columns: Of the output.
        parts: Of the sum.
        sets: Of warps that have all of the block's columns and parts, of other pixels each.
        down: Pixels of a set at a time.
        stages: Stretches of so many pixels, of all sets, in shared memory.
        blocks: On a multiprocessor. Where these do not fit there are fewer stages, or fewer blocks.
    """

    columns: int
    parts: int
    sets: int
    down: int
    stages: int
    blocks: int

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.columns // WARP_COLUMNS * self.parts * self.sets

    @property
    def length(self) -> int:
        """Pixels of a block at a time."""
        return self.sets * self.down

    def shared_bytes(self, channels: int, maps: int, stages: int) -> int:
        """Pixels of so many channels and of `maps` that have the output's; then what the parts of a sum exchange.

        In the place of the last stage there are, before it is used, 16 rows of each warp's weight.
        """
        stage = 2 * self.length * (channels + 8 + maps * self.columns)
        last = max(stage, 2 * 16 * (WARP_COLUMNS + 8) * self.warps)
        return (stages - 1) * stage + last + 4 * (self.parts - 1) * self.length * self.columns


# By channels of the first map, of the second (0: there is none), and of the output. What is not here is for products of
# PyTorch; `python benchmarks/plans.py --maps-of-channels` times both.
CUTS = {
    # Gradients of a residual block's first convolution, with the sum and the mask behind it, and the last convolution
    # itself, with the sum and the ReLU.
    (64, 0, 256): Cut(256, parts=1, sets=2, down=32, stages=3, blocks=1),
    (128, 0, 512): Cut(256, parts=1, sets=1, down=64, stages=2, blocks=1),
    (256, 0, 1024): Cut(256, parts=1, sets=1, down=32, stages=4, blocks=1),
    # Gradients of the last one, with its norm.
    (256, 64, 64): Cut(64, parts=1, sets=2, down=16, stages=4, blocks=2),
    (512, 128, 128): Cut(128, parts=2, sets=1, down=32, stages=4, blocks=1),
}


# Channels of the first map and of the output with which a ReLU behind a sum is the plan: with more of them there is
# more to multiply than to move, where cuDNN is faster.
RELUS = {(64, 256), (128, 512)}


@functools.cache
def plan_channel_map(
    machine: Machine,
    dtype: torch.dtype,
    pixels: int,
    first: int,
    second: int,
    columns: int,
    *,
    level: bool,
    addend: bool,
    mask: bool,
    relu: bool = False,
) -> Launch | None:
    """How pixels are shared, or None where this kernel is not the plan.

    Args:
        machine: The GPU.
        dtype: Of all operands.
        pixels: Of all maps.
        first: Channels of the first map.
        second: Channels of the second, or 0.
        columns: Channels of the output.
        level: Whether a number is added to each column.
        addend: Whether a map is added.
        mask: Whether only pixels and columns count where a map is positive.
        relu: Whether a ReLU follows.
    """
    cut = CUTS.get((first, second, columns)) if not relu or (first, columns) in RELUS else None
    if cut is None or dtype.itemsize != 2 or pixels >= 2**31:
        return None

    def shared(stages: int) -> int:
        return cut.shared_bytes(first + second, addend + mask, stages)

    chosen = machine.stages_of(shared, cut.stages, cut.blocks)
    if chosen is None:
        return None
    stages, blocks = chosen
    along = columns // cut.columns
    pieces = max(1, min(-(-pixels // cut.length), machine.multiprocessors * blocks // along))
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[dtype],
        "FIRST": first,
        "SECOND": second,
        "ALL_COLUMNS": columns,
        "COLUMNS": cut.columns,
        "PARTS": cut.parts,
        "DOWN": cut.down,
        "STAGES": stages,
        "WARPS": cut.warps,
        "BLOCKS": blocks,
        "LEVEL": level,
        "ADDEND": addend,
        "MASK": mask,
        "RELU": relu,
    }
    kernel = specialise("channel_map.cu", "map_channels", **constants)
    return Launch(kernel, (pieces, along), 32 * cut.warps, shared(stages))
