"""Position-sensitive attention, `kernels/position_sensitive.cu`: which shapes it takes, how it is cut into blocks."""

import functools

import torch

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape, round_up
from gsanet.functional.fused.plan.softmax_lines import LONGEST, bundles_of, grid_of, rows_of, shares_of

LARGEST = 512  # pixels of a bundle times channels of a key: gradients of tables are in registers
FEWEST = 4  # heads of a block, where they fit: what it reads of a pixel is then long enough


def fits_position_sensitive(length: int, key: int) -> bool:
    """Whether the kernels take lines of this length with so many channels of a head's queries, half of its values'."""
    return 1 <= length <= LONGEST and key > 0 and key % 4 == 0 and rows_of(length) * key <= LARGEST


@functools.cache
def plan_position_sensitive(
    machine: Machine, dtype: torch.dtype, heads: int, key: int, length: int, lines: int, images: int, entry: str
) -> Launch:
    """The forward pass (`position_sensitive_forward`) or its gradients (`position_sensitive_backward`).

    Args:
        machine: The GPU.
        dtype: Of the maps.
        heads: Of the whole map.
        key: Channels of q, and of k, in one head.
        length: Pixels of a line.
        lines: Of an image.
        images: Of the batch.
        entry: The kernel.
    """
    backward = entry == "position_sensitive_backward"
    shape, rows = Shape(dtype, heads, key, 2 * key, vector=True), rows_of(length)
    sizes = {count: _shared(shape, rows, count, backward) for count in shares_of(heads)}
    fitting = [count for count, size in sizes.items() if size <= machine.shared_memory] or [1]
    enough = [count for count in fitting if count >= FEWEST] or fitting[:1]

    def warps(count: int) -> tuple[int, int]:
        """On a multiprocessor, and of a block."""
        return count * min(machine.blocks_of(sizes[count]), _warps(shape, rows, backward) // count), count

    together, count = max(map(warps, enough))
    blocks = max(1, together // count)
    kernel = specialise(
        "position_sensitive.cu",
        entry,
        SCALAR=SCALARS[dtype],
        LENGTH=length,
        KEY=key,
        HEADS=count,
        WARPS=count,
        BLOCKS=blocks,
    )
    grid = grid_of(machine, images * bundles_of(lines, length), blocks, heads // count)
    return Launch(kernel, grid, 32 * count, sizes[count])


def _warps(shape: Shape, rows: int, backward: bool) -> int:
    """How many of a multiprocessor have enough registers."""
    if not backward:
        return 24 if rows * shape.key <= 256 and rows == 16 else 16
    # Of a thread: gradients of tables, and scores three times.
    held = rows * (2 * round_up(shape.key, 8) + shape.value) // 16 + rows * 3 // 2
    return 8 if shape.size == 4 or held > 100 else 12 if held > 64 else 16


def _shared(shape: Shape, rows: int, heads: int, backward: bool) -> int:
    """Bytes of a block: scores by keys, tables, buffers of the warps, and two stages of maps."""
    padded, value = round_up(shape.key, 8), shape.value
    own = 2 * padded + value
    scores = heads * rows * (rows + 4)
    tables = heads * 2 * rows * shape.odd_stride(own)
    buffers = heads * 16 * shape.odd_stride(rows + 16) if backward or shape.size == 4 else 0
    stages = 2 * rows * shape.odd_stride(heads * own)
    results = rows * (2 * shape.odd_stride(2 * heads * value) if backward else shape.odd_stride(heads * value))
    return 4 * scores + shape.size * (tables + buffers + stages + results)
