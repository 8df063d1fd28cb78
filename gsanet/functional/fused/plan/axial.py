"""Softmax attention along lines, `kernels/axial.cu`: which shapes it takes, and how it is cut into blocks."""

import functools

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape, round_up
from gsanet.functional.fused.plan.softmax_lines import LONGEST, bundles_of, grid_of, rows_of, shares_of

LARGEST = 1024  # pixels of a line times channels of a head: gradients of keys and values are in registers
TOGETHER = 256  # channels of a block, at most
BLOCKS = {"axial_forward": 3, "axial_backward": 2}  # of eight warps, on a multiprocessor


def fits_axial(length: int, key: int, value: int) -> bool:
    """Whether the kernels take lines of this length with heads of these widths."""
    widest = round_up(max(key, value), 16) if max(key, value) > 8 else 8
    return 1 <= length <= LONGEST and rows_of(length) * widest <= LARGEST


@functools.cache
def plan_axial(machine: Machine, shape: Shape, length: int, lines: int, images: int, entry: str) -> Launch:
    """The forward pass (`axial_forward`) or its gradients (`axial_backward`).

    Args:
        machine: The GPU.
        shape: Of the layer.
        length: Pixels of a line.
        lines: Of an image.
        images: Of the batch.
        entry: The kernel.
    """
    backward = entry == "axial_backward"
    key, value = shape.padded(shape.key), shape.padded(shape.value)
    for heads in shares_of(shape.heads):
        shared = _shared(shape, rows_of(length), heads, key, value, backward)
        if heads * max(key, value) <= TOGETHER and shared <= machine.shared_memory:
            break
    else:
        heads, shared = 1, _shared(shape, rows_of(length), 1, key, value, backward)
    # As many as shared memory has room for, and as a thread has enough registers with.
    blocks = max(1, min(BLOCKS[entry] * 8 // heads, machine.blocks_of(shared)))
    if shape.size == 4 or rows_of(length) > 48:
        blocks = max(1, min(blocks, (1 if backward or shape.size == 4 else 2) * 8 // heads))
    kernel = specialise(
        "axial.cu",
        entry,
        SCALAR=SCALARS[shape.dtype],
        LENGTH=length,
        KEY=shape.key,
        VALUE=shape.value,
        HEADS=heads,
        WARPS=heads,
        VECTOR=shape.vector,
        BLOCKS=blocks,
    )
    grid = grid_of(machine, images * bundles_of(lines, length), blocks, shape.heads // heads)
    return Launch(kernel, grid, 32 * heads, shared)


def _shared(shape: Shape, rows: int, heads: int, key: int, value: int, backward: bool) -> int:
    """Bytes of a block: table, buffers of the warps, two stages of maps."""
    table = 2 * rows * shape.odd_stride(key)
    buffers = heads * 16 * shape.odd_stride(rows + 16) if backward or shape.size == 4 else 0
    keys, values = (rows * shape.odd_stride(heads * width) for width in (key, value))
    stages = 2 * (2 * keys + (2 if backward else 1) * values)
    sums = 2 * rows * key * 4 if backward else 0
    return (table + buffers) * shape.size + max(stages * shape.size, sums)
