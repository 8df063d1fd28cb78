"""Local relation, `kernels/relation.cu`: which shapes it takes, and how it is cut into blocks."""

import functools

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape

WIDEST = 16  # channels of a head, which a thread has in registers more than once
LARGEST = 7  # pixels of a window's side, whose weights are in registers
MOST_HEADS = 128  # of a block
WARPS = range(4, 9)  # of a block
# On a multiprocessor, as many as have enough registers; those of floats need more of them.
TOGETHER = {"relation_forward": 24, "relation_queries": 20, "relation_neighbours": 16}


@functools.cache
def plan_relation(machine: Machine, entry: str, shape: Shape, pixels: int, window: int, stride: int) -> Launch:
    """One of the kernels.

    Args:
        machine: The GPU.
        entry: The kernel.
        shape: Of the values.
        pixels: Of the batch, as many as the kernel writes.
        window: Pixels of its side.
        stride: Of the output.
    """
    heads = max(n for n in range(1, min(shape.heads, MOST_HEADS) + 1) if shape.heads % n == 0)
    # As few idle threads as possible, and rather more warps.
    warps = max((n for n in WARPS if 32 * n >= heads), key=lambda n: (32 * n // heads * heads / n, n))
    threads, blocks = 32 * warps, max(1, (16 if shape.size == 4 else TOGETHER[entry]) // warps)
    shared = 4 * window**2 * heads
    if entry == "relation_neighbours":
        shared += 4 * window * threads
    kernel = specialise(
        "relation.cu",
        entry,
        SCALAR=SCALARS[shape.dtype],
        CHANNELS=shape.value,
        HEADS=heads,
        WINDOW=window,
        STRIDE=stride,
        VECTOR=shape.vector,
        WARPS=warps,
        BLOCKS=blocks,
    )
    chunks = shape.heads // heads
    grid = max(1, min(-(-pixels // (threads // heads)), machine.multiprocessors * blocks // chunks)), chunks
    # Neighbours are read from the cache: no more shared memory than there must be.
    carveout = min(100, -(-100 * blocks * (shared + 1024) // machine.shared_memory_in_all))
    return Launch(kernel, grid, threads, shared, carveout)
