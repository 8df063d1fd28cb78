"""Attention along lines: short lines in bundles, longer ones whole, and for the gradient of the longest in pieces.

What is faster was measured at the shapes of the networks: `benchmarks/plans.py`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape, bundle_of, round_up

BAND = 64  # pixels of a line whose scores are held at a time
LONGEST = 320  # pixels of a line
SHORT = 16  # pixels of a line up to which more and smaller blocks are faster
# Gradients with those of keys, in 16 bits, whose fastest cut the rules below do not find: (length, channels of a
# head) -> (pairs of a line and a head in a block, warps, blocks on a multiprocessor).
FASTER = {(14, 32): (8, 8, 2), (32, 16): (8, 8, 2)}
SHORT_PIECE = 32  # pixels of a piece of a line below which what comes with each pair of pieces outweighs its products


@functools.cache
def plan_line(
    machine: Machine, shape: Shape, length: int, lines: int, images: int, *, backward: bool, **features: bool
) -> Launch | None:
    """Attention along the lines of a map, or None if a block's part does not fit into shared memory or registers.

    Args:
        machine: The GPU.
        shape: The layer.
        length: Pixels on a line.
        lines: Lines of an image.
        images: In the batch.
        backward: The gradient's kernel.
        features: The switches of `kernels/line_forward.cu` or `kernels/line_gradient.cuh`, in lower case.
    """
    if length <= 8:
        return _plan_bundled(machine, shape, length, lines, images, backward, features)
    if not backward:
        in_registers = _plan_in_registers(machine, shape, length, lines * images, features)
        return in_registers or _plan_whole(machine, shape, length, lines * images, False, features)
    whole = _plan_whole(machine, shape, length, lines * images, True, features) if length <= BAND else None
    return whole or _plan_pieces(machine, shape, length, lines * images, features)


def _plan_bundled(
    machine: Machine,
    shape: Shape,
    length: int,
    lines: int,
    images: int,
    backward: bool,
    features: Mapping[str, bool],
) -> Launch | None:
    """Blocks that hold short lines of one image, several in the 16 rows of a product."""
    bundle, pairs = bundle_of(length), 8
    bundles = -(-lines // bundle)  # of an image
    while not backward and pairs > 1 and bundles * images * shape.heads < pairs * machine.multiprocessors:
        pairs //= 2
    for heads, lines_at_once in _bundled_cuts(shape, pairs, bundles, bundle, features):
        shared = _line_memory(shape, length, heads, lines_at_once, backward, features)
        shared += 8 * _sums_memory(shape, features) if backward else 0
        if shared > machine.shared_memory:
            continue
        chosen = _bundled_warps(shape, backward, features, machine.blocks_of(shared))
        if chosen is None:
            return None
        entry = "line_backward" if backward else "line_forward"
        cut = (length, heads, lines_at_once, *chosen)
        return _launch_lines(machine, shape, entry, cut, images * -(-lines // lines_at_once), shared, features)
    return None


def _plan_whole(
    machine: Machine, shape: Shape, length: int, lines: int, backward: bool, features: Mapping[str, bool]
) -> Launch | None:
    """Blocks that hold whole lines."""
    if backward and (faster := _faster(shape, length, features)) is not None:
        pairs, warps, blocks = faster

        def as_measured(_: int, fitting: int) -> tuple[int, int] | None:
            return (warps, blocks) if blocks <= fitting else None

        plan = _fit_whole(machine, shape, length, lines, True, features, pairs, as_measured)
        if plan is not None:
            return plan
    pairs = 8 if not backward and _few_pairs(shape, length, features) else 16
    while not backward and pairs > 2 and lines * shape.heads < pairs * machine.multiprocessors:
        pairs //= 2  # a batch of few images: rather half-empty products than idle multiprocessors

    def choose(pairs: int, fitting: int) -> tuple[int, int] | None:
        if backward:
            return _backward_warps(shape, length, pairs, fitting, features)
        return _forward_warps(shape, length, fitting)

    return _fit_whole(machine, shape, length, lines, backward, features, pairs, choose)


def _fit_whole(
    machine: Machine,
    shape: Shape,
    length: int,
    lines: int,
    backward: bool,
    features: Mapping[str, bool],
    pairs: int,
    choose: Callable[[int, int], tuple[int, int] | None],
) -> Launch | None:
    """So many pairs in a block, or as many as fit; `choose` gives warps and blocks for the pairs and blocks that do."""
    for heads, lines_at_once in _cuts(shape.heads, pairs):
        if features.get("pool") and lines_at_once % 2:
            continue
        shared = _line_memory(shape, length, heads, lines_at_once, backward, features)
        sums = _sums_memory(shape, features) if backward else 0
        if shared + 16 * sums > machine.shared_memory:
            continue
        chosen = choose(heads * lines_at_once, machine.blocks_of(shared + 8 * sums))
        if chosen is None:
            return None
        entry = "line_backward" if backward else "line_forward"
        cut = (length, heads, lines_at_once, *chosen)
        items = -(-lines // lines_at_once)
        return _launch_lines(machine, shape, entry, cut, items, shared + chosen[0] * sums, features)
    return None


def _faster(shape: Shape, length: int, features: Mapping[str, bool]) -> tuple[int, int, int] | None:
    """(pairs, warps, blocks) of a gradient that `FASTER` names: that of the columns of a module with both axes."""
    if shape.size != 2 or shape.key != shape.value or features.get("pool") or features.get("content_queries"):
        return None
    return FASTER.get((length, shape.key)) if features.get("content_keys") else None


def _in_registers(shape: Shape, length: int, features: Mapping[str, bool]) -> list[tuple[int, int, int]]:
    """(pairs, warps, blocks) of a layer whose scores stay in registers, the first that fits; none if others are faster.

    Measured at the shapes of the networks (`benchmarks/plans.py --registers`).
    """
    widest = max(shape.padded(shape.key), shape.padded(shape.value))
    if features.get("content"):
        # Two lines that are not long are averaged faster if their scores are added up first, which this way cannot.
        shortest = 32 if features.get("pool") else SHORT
        return [(8, 4, 5)] if widest <= 16 and length > shortest else []
    if widest > 64:
        return []
    return [(16, 4, 5 if length * widest <= 256 else 4), (8, 4, 4)]


def _plan_in_registers(
    machine: Machine, shape: Shape, length: int, lines: int, features: Mapping[str, bool]
) -> Launch | None:
    """Blocks that hold whole lines, each warp with a pair of its own whose scores it has in registers.

    None if that is not the way to go, and for batches that leave multiprocessors idle.
    """
    if shape.size != 2 or length > BAND:
        return None
    for pairs, warps, blocks in _in_registers(shape, length, features):
        if lines * shape.heads < pairs * machine.multiprocessors:
            continue
        for heads, lines_at_once in _cuts(shape.heads, pairs):
            if features.get("pool") and lines_at_once % 2:
                continue
            accesses = heads * shape.value // (16 // shape.size if shape.vector else 1)
            if features.get("statistics") and accesses > 32 * warps:
                continue  # a thread has the sums of one access
            shared = _memory_in_registers(shape, length, heads, lines_at_once, warps)
            if shared <= machine.shared_memory and machine.blocks_of(shared) >= blocks:
                cut = (length, heads, lines_at_once, warps, blocks)
                items = -(-lines // lines_at_once)
                return _launch_lines(machine, shape, "line_forward", cut, items, shared, features, in_registers=True)
            if heads * lines_at_once == pairs:
                break  # others of this number would take as much
    return None


def _memory_in_registers(shape: Shape, length: int, heads: int, lines: int, warps: int) -> int:
    """Bytes of a block whose scores are in registers."""
    query, value = shape.padded(shape.key), shape.padded(shape.value)
    scalars = shape.tile(max(query, value), heads, lines, length) + shape.tile(value, heads, lines, length)
    scalars += (round_up(length, 16) + round_up(length, 8)) * shape.odd_stride(query)
    sums = 2 * 16 // shape.size * 32 * warps  # of the channels, at the end
    return round_up(max(scalars * shape.size, 4 * sums), 16)


def _plan_pieces(
    machine: Machine, shape: Shape, length: int, lines: int, features: Mapping[str, bool]
) -> Launch | None:
    """Blocks that hold pieces of lines, for the gradient: `kernels/line_backward_pieces.cu`.

    Rather blocks that fill their products than long pieces, but what each pair of pieces costs besides its products
    wants these not too short.
    """
    sums = _sums_memory(shape, features)
    for shortest in (SHORT_PIECE, 16):
        for heads, lines_at_once in _cuts(shape.heads, 16):
            if features.get("pool") and lines_at_once % 2:
                continue
            items = -(-lines // lines_at_once)
            for piece in _pieces(length, shortest):
                shared = _pieces_memory(shape, piece, heads, lines_at_once, features)
                if shared + 16 * sums > machine.shared_memory:
                    continue
                fitting = machine.blocks_of(shared + 8 * sums)
                chosen = _backward_warps(shape, piece, heads * lines_at_once, fitting, features, whole=False)
                if chosen is not None:
                    cut = (piece, heads, lines_at_once, *chosen)
                    shared += chosen[0] * sums
                    return _launch_lines(machine, shape, "line_backward_pieces", cut, items, shared, features)
    return None


def _pieces(length: int, shortest: int) -> Iterator[int]:
    """Lengths of the pieces of a line, which are of about one length: multiples of 8, the longest first."""
    lengths = (round_up(-(-length // pieces), 8) for pieces in range(-(-length // BAND), -(-length // 8) + 1))
    return (piece for piece in dict.fromkeys(lengths) if piece >= shortest)


def _launch_lines(
    machine: Machine,
    shape: Shape,
    entry: str,
    cut: tuple[int, int, int, int, int],
    items: int,
    shared: int,
    features: Mapping[str, bool],
    *,
    in_registers: bool = False,
) -> Launch:
    """A kernel of lines; `cut` is (pixels that a block holds, heads, lines at once, warps, blocks).

    `items` is how many times so many lines there are.
    """
    length, heads, lines_at_once, warps, blocks = cut
    kernel = specialise(
        f"{entry}.cu",
        entry,
        SCALAR=SCALARS[shape.dtype],
        LENGTH=length,
        KEY=shape.key,
        VALUE=shape.value,
        HEADS=heads,
        LINES=lines_at_once,
        WARPS=warps,
        BLOCKS=blocks,
        BAND=BAND,
        IN_REGISTERS=in_registers,
        VECTOR=shape.vector,
        **{name.upper(): value for name, value in features.items()},
    )
    groups = shape.heads // heads
    persistent = max(1, machine.multiprocessors * blocks // groups)
    return Launch(kernel, (min(items, persistent), groups), 32 * warps, shared)


def _few_pairs(shape: Shape, length: int, features: Mapping[str, bool]) -> bool:
    """Whether forward eight pairs in a block are faster than 16: products are half empty, but more blocks have room.

    What is faster was measured, in bfloat16, at the shapes of the networks (`benchmarks/plans.py`).
    """
    return length <= SHORT and max(shape.key, shape.value) * length > 256 and not features.get("pool")


def _cuts(heads: int, pairs: int) -> list[tuple[int, int]]:
    """(heads, lines) of a block, so many pairs of them if that can be, and fewer where they do not fit.

    Where lines are pooled they come in twos.
    """
    whole, *others = [divisor for divisor in range(min(heads, pairs), 0, -1) if heads % divisor == 0]
    most = pairs // whole
    cuts = [(whole, lines) for lines in range(most, 0, -1) if lines in (1, 2, 4, 8, most)]
    return cuts + [(divisor, lines) for divisor in others for lines in (2, 1)]


def _bundled_cuts(
    shape: Shape, pairs: int, bundles: int, bundle: int, features: Mapping[str, bool]
) -> list[tuple[int, int]]:
    """The same for lines of an image that come in so many bundles.

    Wide heads have context vectors that are larger than lines. There a block rather has few heads, and many lines that
    read the same vectors at the same time.
    """
    content = any(features.get(name) for name in ("content", "content_queries", "content_keys"))
    together = min(4, pairs) if content and max(shape.key, shape.value) > 32 else 1
    cuts = []
    while together:
        cuts += [(heads, times * together) for heads, times in _cuts(shape.heads, pairs // together)]
        together //= 2
    return [(heads, number * bundle) for heads, number in cuts if number <= bundles and heads * number <= pairs]


def _sums_memory(shape: Shape, features: Mapping[str, bool]) -> int:
    """Bytes for each warp of the gradient's sums of channels."""
    return 32 * 8 * 16 // shape.size if features.get("statistics") else 0


def _pieces_memory(shape: Shape, length: int, heads: int, lines: int, features: Mapping[str, bool]) -> int:
    """As `_line_memory` of so long a line without keys, and a window of the table's gradient."""
    without_keys = _line_memory(shape, length, heads, lines, True, {**features, "content_keys": False})
    return without_keys + 4 * round_up((2 * length - 1) * shape.key, 4)


def _line_memory(
    shape: Shape, length: int, heads: int, lines: int, backward: bool, features: Mapping[str, bool]
) -> int:
    query, value = shape.padded(shape.key), shape.padded(shape.value)
    attended, pairs = min(length, BAND), 8 if length <= 8 else 16
    columns = round_up(attended, 16 if shape.size == 2 or attended <= 8 else 8)
    scores = 16 * shape.odd_stride(pairs * shape.odd_stride(columns)) + 16
    before = max(length - 1, 7)  # rows of the table
    table = (before + round_up(length, BAND if length > BAND else 16)) * shape.odd_stride(query)
    if backward:
        queries = shape.tile(query, heads, lines, length)
        gradient = values = shape.tile(value, heads, lines, length)
        if features.get("pool") and length > 8:  # four pixels have one gradient
            gradient = shape.tile(value, heads, lines // 2, round_up(length // 2, 16))
        scalars = queries + values + gradient + (queries if features.get("content_keys") else 0) + scores + table
        floats = round_up((2 * length - 1) * shape.key, 4)  # of the table's gradient, at the end
    else:
        scalars = shape.tile(max(query, value), heads, lines, length) + shape.tile(value, heads, lines, length)
        scalars += scores + table
        floats = 0
    sums = 0 if backward else 2 * 16 // shape.size * 256  # of the channels, at the end
    return round_up(max(scalars * shape.size, 4 * floats, 4 * sums), 16)


def _bundled_warps(shape: Shape, backward: bool, features: Mapping[str, bool], fitting: int) -> tuple[int, int] | None:
    """(warps, blocks on a multiprocessor) of bundles: as many blocks as have registers enough.

    Measured at 4x4x512, 8x8x256, 8x8x512 and 7x7x512 (`benchmarks/plans.py`); a fourth block of the row layer costs a
    third of its speed at the first of them, a fifth block nothing or a little at the second. The gradient of a module
    with one axis, which has both parts of content attention in it, is a fifth faster alone at the last two.
    """
    widest = max(shape.padded(shape.key), shape.padded(shape.value))
    if backward:
        both_parts = features.get("content_queries") and features.get("content_keys")
        most = 3 if widest <= 32 else 2 if widest <= 64 and not both_parts else 1
    else:
        alone = not (features.get("statistics") or features.get("norm_values"))  # with no norm before or behind it
        most = 4 if widest <= 32 or (widest <= 64 and alone) else 3
    return 8, min(fitting, most)


def _forward_warps(shape: Shape, length: int, fitting: int) -> tuple[int, int]:
    """(warps, blocks on a multiprocessor): fewer blocks leave more registers to those with wide heads."""
    widest = max(shape.padded(shape.key), shape.padded(shape.value))
    if widest > 32:
        most = 2
    elif length <= SHORT:
        most = 4
    else:
        most = 2 if widest == 32 else 3
    return 8, max(1, min(fitting, most))


def _backward_warps(
    shape: Shape, length: int, pairs: int, fitting: int, features: Mapping[str, bool], *, whole: bool = True
) -> tuple[int, int] | None:
    """The same for the gradient, whose sums stay in registers; None if there are too many.

    The limits are those under which little is spilled; where one block of whole lines fits, 16 warps are faster than 8
    if it is so. Of pieces of lines (`whole=False`) one block of 8 warps is faster than two of them, and than one of 16.
    """
    content_keys = features.get("content_keys", False)
    eights, tiles = -(-length // 8), round_up(length, 16) // 16
    table = (2 * eights - 1) * shape.padded(shape.key) // 8 * 2
    values = tiles * shape.padded(shape.value) // 8 * 4
    choices = [(8, 2, 70), (16, 1, 82 if content_keys else 96), (8, 1, 190)]
    if not whole:
        choices = choices[:0:-1]
    elif content_keys and pairs <= 8:
        choices = choices[2:]
    elif content_keys and shape.padded(shape.value) >= 32:
        choices[:2] = choices[1::-1]
    for warps, blocks, registers in choices:
        if blocks <= fitting and table + values * -(-pairs // warps) <= registers:
            return warps, blocks
    return None
