"""Position-sensitive attention, `kernels/position_sensitive.cu`: which shapes it takes, how it is cut into blocks."""

import functools

import torch

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape, round_up
from gsanet.functional.fused.plan.softmax_lines import LONGEST, bundles_of, grid_of, rows_of, shares_of

LARGEST = 512  # pixels of a bundle times channels of a key: gradients of tables are in registers
SUMS = ("position_sensitive_sums", "position_sensitive_sums_gradient")
SOURCES = {
    "position_sensitive_forward": "position_sensitive.cu",
    "position_sensitive_backward": "position_sensitive.cu",
    **dict.fromkeys(SUMS, "position_sensitive_sums.cu"),
}
FEWEST = 4  # heads of a block, where they fit: what it reads of a pixel is then long enough


def fits_position_sensitive(length: int, key: int) -> bool:
    """Whether the kernels take lines of this length with so many channels of a head's queries, half of its values'."""
    return 1 <= length <= LONGEST and key > 0 and key % 4 == 0 and rows_of(length) * key <= LARGEST


@functools.cache
def plan_position_sensitive(
    machine: Machine, dtype: torch.dtype, heads: int, key: int, length: int, lines: int, images: int, entry: str
) -> Launch:
    """One of the kernels.

    Args:
        machine: The GPU.
        dtype: Of the maps.
        heads: Of the whole map.
        key: Channels of q, and of k, in one head.
        length: Pixels of a line.
        lines: Of an image.
        images: Of the batch.
        entry: The kernel, such as `position_sensitive_forward`.
    """
    shape, rows = Shape(dtype, heads, key, 2 * key, vector=True), rows_of(length)
    sizes = {count: _shared(shape, rows, count, entry) for count in shares_of(heads)}
    fitting = [count for count, size in sizes.items() if size <= machine.shared_memory] or [1]
    enough = [count for count in fitting if count >= FEWEST] or fitting[:1]

    def warps(count: int) -> tuple[int, int]:
        """On a multiprocessor, and of a block."""
        return count * min(machine.blocks_of(sizes[count]), _warps(shape, rows, entry) // count), count

    together, count = max(map(warps, enough))
    blocks = max(1, together // count)
    kernel = specialise(
        SOURCES[entry],
        entry,
        SCALAR=SCALARS[dtype],
        LENGTH=length,
        KEY=key,
        MOVED=2 * key if entry in SUMS else 4 * key,
        HEADS=count,
        WARPS=count,
        BLOCKS=blocks,
    )
    grid = grid_of(machine, images * bundles_of(lines, length), blocks, heads // count)
    return Launch(kernel, grid, 32 * count, sizes[count])


def _warps(shape: Shape, rows: int, entry: str) -> int:
    """How many of a multiprocessor have enough registers."""
    if entry in ("position_sensitive_forward", "position_sensitive_sums"):
        return 24 if rows * shape.key <= 256 and rows == 16 else 16 if rows <= 32 else 8
    # Of a thread: gradients of tables, and scores three times.
    moved = 0 if entry in SUMS else shape.value
    held = rows * (2 * round_up(shape.key, 8) + moved) // 16 + rows * 3 // 2
    return 8 if shape.size == 4 or held > 100 else 12 if held > 64 else 16


def _shared(shape: Shape, rows: int, heads: int, entry: str) -> int:
    """Bytes of a block: scores by keys, tables, buffers of the warps, two stages of maps, and results."""
    value = 0 if entry in SUMS else shape.value
    own = 2 * round_up(shape.key, 8) + value
    scores = 0 if entry in SUMS else heads * rows * (rows + 4)
    tables = (1 if entry in SUMS else heads) * 2 * rows * shape.odd_stride(own)
    buffers, results = heads * 16 * shape.odd_stride(rows + 16), 0
    if entry == "position_sensitive_forward":
        buffers, results = buffers if shape.size == 4 else 0, rows * shape.odd_stride(heads * value)
    elif entry == "position_sensitive_backward":
        results = 2 * rows * shape.odd_stride(2 * heads * value)
    elif entry == "position_sensitive_sums":
        buffers = 0
    stages = 2 * rows * shape.odd_stride(heads * own)
    return 4 * scores + shape.size * (tables + buffers + stages + results)
