"""Sums over pixels of products of channels, and of channels: `kernels/pixel_products.cu`."""

import functools
from typing import NamedTuple

import torch

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.maps import plan_rows
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine


class Cut(NamedTuple):
    """How a block works.

    Args:
        rows: Channels of y.
        columns: Channels of x.
        unit_rows: Of these a warp's.
        unit_columns: The same.
        sets: Of warps that have all of the block's products, over other pixels each.
        length: Pixels at a time.
        stages: Stretches of so many pixels in shared memory.
        blocks: On a multiprocessor. Where these do not fit there are fewer stages, or fewer blocks.
    """

    rows: int
    columns: int
    unit_rows: int
    unit_columns: int
    sets: int
    length: int
    stages: int
    blocks: int

    def warps(self, triangle: bool) -> int:
        """Of a block; `triangle`: x is y, and the block has all channels of it."""
        down, along = self.rows // self.unit_rows, self.columns // self.unit_columns
        return self.sets * (down * (down + 1) // 2 if triangle else down * along)

    def shared_bytes(self, triangle: bool, stages: int) -> int:
        """Pixels of both maps; later 16 rows of what each warp has, or the sums of the rows."""
        pixel = 2 * (self.rows + 8 if triangle else self.rows + self.columns + 16)
        left = 16 * self.warps(triangle) * (self.unit_columns + 8)
        return max(stages * self.length * pixel, 4 * left, 4 * self.sets * self.rows)


# By channels of x, channels of y, and whether x is y. What is not here is for a matrix product and a sum of PyTorch;
# `python benchmarks/plans.py --products` times both.
CUTS = {
    (64, 64, True): Cut(64, 64, 64, 64, sets=8, length=128, stages=6, blocks=1),
    (64, 256, False): Cut(256, 64, 64, 64, sets=2, length=64, stages=4, blocks=1),
    (128, 128, True): Cut(128, 128, 32, 32, sets=2, length=64, stages=4, blocks=1),
    (128, 512, False): Cut(256, 128, 64, 64, sets=1, length=64, stages=3, blocks=1),
    (256, 256, True): Cut(128, 128, 64, 64, sets=1, length=32, stages=4, blocks=2),
}
# The same with a linear map of y beside it, and without the sums, by channels of x and y: the gradients of a 1x1
# convolution of x. Its other products are PyTorch's; `python benchmarks/plans.py --gradients` times both.
MAPPED = {(64, 192): Cut(192, 64, 32, 32, sets=1, length=96, stages=4, blocks=1)}


class PixelProducts(NamedTuple):
    """The kernel and, but for a map, the one that adds what so many blocks have left."""

    launches: tuple[Launch, ...]
    pieces: int


@functools.cache
def plan_pixel_products(
    machine: Machine, dtype: torch.dtype, pixels: int, columns: int, rows: int, same: bool, mapped: bool = False
) -> PixelProducts | None:
    """How pixels are shared, or None where these kernels are not the plan.

    Args:
        machine: The GPU.
        dtype: Of both maps.
        pixels: Of both maps.
        columns: Channels of x.
        rows: Channels of y.
        same: Whether x is y.
        mapped: Whether there is a linear map of y, and no sums of its channels.
    """
    cut = MAPPED.get((columns, rows)) if mapped else CUTS.get((columns, rows, same))
    if cut is None or dtype.itemsize != 2 or pixels >= 2**31:
        return None
    whole = (cut.rows, cut.columns) == (rows, columns)
    triangle = same and whole
    chosen = machine.stages_of(functools.partial(cut.shared_bytes, triangle), cut.stages, cut.blocks)
    if chosen is None:
        return None
    stages, blocks = chosen
    down, along = rows // cut.rows, columns // cut.columns
    parts = down * (down + 1) // 2 if same else down * along  # of the products, one for each block
    pieces = max(1, min(-(-pixels // cut.length), machine.multiprocessors * blocks // parts))
    warps = cut.warps(triangle)
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[dtype],
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "UNIT_ROWS": cut.unit_rows,
        "UNIT_COLUMNS": cut.unit_columns,
        "LENGTH": cut.length,
        "STAGES": stages,
        "WARPS": warps,
        "BLOCKS": blocks,
        "SYMMETRIC": same,
        "WHOLE": whole,
        "MAP": mapped,
    }
    kernel = specialise("pixel_products.cu", "pixel_products", **constants)
    first = Launch(kernel, (pieces, parts), 32 * warps, cut.shared_bytes(triangle, stages))
    if mapped:
        return PixelProducts((first,), pieces)
    total = plan_rows("pixel_products_sum.cu", "sum_pixel_products", rows * columns + rows, 1, SYMMETRIC=same)
    return PixelProducts((first, total), pieces)
