"""Context vectors of content attention, and their gradient: sums over all pixels of an image."""

import functools

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape, round_up

# The most pixels that a block takes at once, and bytes of shared memory: larger maps pass through two stages.
LENGTH, MEMORY = 112, 66 * 1024


@functools.cache
def plan_context(
    machine: Machine, shape: Shape, pixels: int, images: int, *, softmax: bool, pool: bool
) -> tuple[Launch, ...]:
    """The sums over pixels of content attention, and how their pieces are combined if there are several."""
    widest = max(shape.key, shape.value)
    heads = max(n for n in range(1, shape.heads + 1) if shape.heads % n == 0 and (n == 1 or n * widest <= 64))
    whole = pixels <= LENGTH and _memory(shape, heads, pixels, 1) <= MEMORY
    # A long way through many pixels wants blocks for all multiprocessors, and several for each.
    wanted = (1 if whole else 3) * machine.multiprocessors
    while heads > 1 and images * shape.heads < heads * wanted:
        heads = max(n for n in range(1, heads) if shape.heads % n == 0)
    length, stages, pieces = pixels, 1, 1
    if not whole:
        length = 16  # at a time
        while length < LENGTH and _memory(shape, heads, length + 16, 2) <= MEMORY:
            length += 16
        length = round_up(-(-pixels // -(-pixels // length)), 16)  # all of about one length
        stages, stretches = 2, -(-pixels // length)
        pieces = max(1, min(stretches, wanted * heads // (2 * images * shape.heads)))  # more than one for few images
        pieces = -(-stretches // -(-stretches // pieces))  # none is empty
    shared = _memory(shape, heads, length, stages)
    # A warp takes 16 keys of one head; the wider ones of these need more registers.
    warps = 8 if heads * -(-shape.key // 16) > 4 else 4
    blocks = (3 if widest <= 16 else 2) * 8 // warps
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[shape.dtype],
        "LENGTH": length,
        "KEY": shape.key,
        "VALUE": shape.value,
        "HEADS": heads,
        "LINES": 1,
        "WARPS": warps,
        "BLOCKS": blocks,
        "VECTOR": shape.vector,
        "SOFTMAX": softmax,
        "POOL": pool,
        "STAGES": stages,
        "WHOLE": pieces == 1,
    }
    partial = specialise("context.cu", "context_partial", **constants)
    launches = [Launch(partial, (images * pieces, shape.heads // heads), 32 * warps, shared)]
    if pieces > 1:
        launches.append(plan_combination(shape, images, softmax=softmax))
    return tuple(launches)


def plan_combination(shape: Shape, images: int, *, softmax: bool) -> Launch:
    """How what blocks leave of the pieces of an image becomes context vectors, or their gradient."""
    kernel = specialise(
        "context.cu",
        "context_combine" if softmax else "context_gradient",
        SCALAR=SCALARS[shape.dtype],
        LENGTH=16,
        KEY=shape.key,
        VALUE=shape.value,
        HEADS=1,
        LINES=1,
        WARPS=8,
        BLOCKS=3,
        VECTOR=shape.vector,
        SOFTMAX=softmax,
        POOL=False,
        STAGES=1,
        WHOLE=False,
    )
    elements = shape.padded(shape.key) * shape.padded(shape.value)
    return Launch(kernel, (images * shape.heads, -(-elements // 256) if softmax else 1), 256, 0)


def _memory(shape: Shape, heads: int, length: int, stages: int) -> int:
    tiles = sum(shape.tile(shape.padded(width), heads, 1, length) for width in (shape.key, shape.value))
    return round_up((stages * tiles + 16) * shape.size, 16)
