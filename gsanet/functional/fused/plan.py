"""How a shape is cut into blocks: the constants that kernels are compiled with, their grids and their shared memory.

The sizes here are those that the kernels' sources work out for themselves (`kernels/tiles.cuh`, `kernels/scores.cuh`).
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gsanet.functional.fused.compiler import Specialisation, specialise

SCALARS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
BAND = 64  # pixels of a line whose scores are held at a time
LONGEST = 320  # pixels of a line
SHORT = 16  # pixels of a line up to which more and smaller blocks are faster
SHORT_PIECE = 32  # pixels of a piece of a line below which what comes with each pair of pieces outweighs its products
WIDTHS = range(4, 129)  # channels of a head
# The most pixels that a block of the context vectors takes at once, and bytes of shared memory: larger maps pass
# through two stages.
CONTEXT_LENGTH, CONTEXT_MEMORY = 112, 66 * 1024
ROW_WARPS = 16  # that share the sums of what other kernels' blocks left


@dataclass(frozen=True)
class Machine:
    """What a plan depends on, of a GPU."""

    multiprocessors: int
    shared_memory: int  # bytes that one block may have
    shared_memory_in_all: int  # of a multiprocessor

    def blocks_of(self, shared: int) -> int:
        """How many blocks fit on a multiprocessor: each takes a kilobyte more than it asks for."""
        return self.shared_memory_in_all // (shared + 1024)


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """The GPU that a tensor is on."""
    facts = torch.cuda.get_device_properties(device)
    return Machine(
        facts.multi_processor_count, facts.shared_memory_per_block_optin, facts.shared_memory_per_multiprocessor
    )


@dataclass(frozen=True)
class Shape:
    """What the kernels of one attention layer are compiled for.

    Args:
        dtype: Of the maps.
        heads: Of the whole map.
        key: Channels of q and k in one head.
        value: Channels of v in one head.
        vector: Whether all widths, strides and addresses allow 16 bytes at once.
    """

    dtype: torch.dtype
    heads: int
    key: int
    value: int
    vector: bool

    @property
    def size(self) -> int:
        """Bytes of a scalar."""
        return self.dtype.itemsize

    def padded(self, width: int) -> int:
        """Channels of a head in shared memory."""
        return _round_up(width, 8 if self.size == 4 or width <= 8 else 16)

    def odd_stride(self, width: int) -> int:
        """The distance of rows in shared memory."""
        accesses = -(-width * self.size // 16)
        return (accesses + 1 - accesses % 2) * 16 // self.size

    def tile(self, width: int, heads: int, lines: int, length: int) -> int:
        """Scalars of a tile of lines, heads and padded channels."""
        head = self.odd_stride(width) if width >= 32 else width
        row = self.odd_stride(heads * head)
        if lines == 1 or length > 8:
            return lines * _round_up(length, 16) * row
        return lines // bundle_of(length) * (16 * row + (heads * 16 // self.size if heads < 8 else 0))


@dataclass(frozen=True)
class Launch:
    """One kernel and how it is started; `grid` is (blocks, groups of heads or of channels).

    `carveout` is the part of a multiprocessor's memory, in percent, that is rather shared memory than cache.
    """

    kernel: Specialisation
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    carveout: int = 100


def bundle_of(length: int) -> int:
    """How many lines share the 16 rows of a product."""
    return 1 if length > 8 else 2 if length > 4 else 4


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
        return _plan_whole(machine, shape, length, lines * images, False, features)
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
        shared = _line_memory(shape, length, heads, lines_at_once, backward, features.get("content_keys", False))
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
    pairs = _most_pairs(shape, length, backward, features)
    while not backward and pairs > 2 and lines * shape.heads < pairs * machine.multiprocessors:
        pairs //= 2  # a batch of few images: rather half-empty products than idle multiprocessors
    for heads, lines_at_once in _cuts(shape.heads, pairs):
        if features.get("pool") and lines_at_once % 2:
            continue
        shared = _line_memory(shape, length, heads, lines_at_once, backward, features.get("content_keys", False))
        sums = _sums_memory(shape, features) if backward else 0
        if shared + 16 * sums > machine.shared_memory:
            continue
        fitting = machine.blocks_of(shared + 8 * sums)
        if backward:
            chosen = _backward_warps(shape, length, heads * lines_at_once, fitting, features)
        else:
            chosen = _forward_warps(shape, length, fitting)
        if chosen is None:
            return None
        entry = "line_backward" if backward else "line_forward"
        cut = (length, heads, lines_at_once, *chosen)
        items = -(-lines // lines_at_once)
        return _launch_lines(machine, shape, entry, cut, items, shared + chosen[0] * sums, features)
    return None


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
                shared = _pieces_memory(shape, piece, heads, lines_at_once)
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
    lengths = (_round_up(-(-length // pieces), 8) for pieces in range(-(-length // BAND), -(-length // 8) + 1))
    return (piece for piece in dict.fromkeys(lengths) if piece >= shortest)


def _launch_lines(
    machine: Machine,
    shape: Shape,
    entry: str,
    cut: tuple[int, int, int, int, int],
    items: int,
    shared: int,
    features: Mapping[str, bool],
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
        VECTOR=shape.vector,
        **{name.upper(): value for name, value in features.items()},
    )
    groups = shape.heads // heads
    persistent = max(1, machine.multiprocessors * blocks // groups)
    return Launch(kernel, (min(items, persistent), groups), 32 * warps, shared)


def _most_pairs(shape: Shape, length: int, backward: bool, features: Mapping[str, bool]) -> int:
    """Pairs of a line and a head in a block: with eight, products are half empty, but more blocks have room.

    What is faster was measured, in bfloat16, at the shapes of the networks (`benchmarks/plans.py`).
    """
    widest = max(shape.key, shape.value)
    if backward:
        few = length <= SHORT and widest == 32 and features.get("pool", False) and not features.get("content_keys")
    else:
        few = length <= SHORT and widest * length > 256
    return 8 if few else 16


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


def _pieces_memory(shape: Shape, length: int, heads: int, lines: int) -> int:
    """As `_line_memory` of so long a line without keys, and a window of the table's gradient."""
    without_keys = _line_memory(shape, length, heads, lines, backward=True, content_keys=False)
    return without_keys + 4 * _round_up((2 * length - 1) * shape.key, 4)


def _line_memory(shape: Shape, length: int, heads: int, lines: int, backward: bool, content_keys: bool) -> int:
    query, value = shape.padded(shape.key), shape.padded(shape.value)
    attended, pairs = min(length, BAND), 8 if length <= 8 else 16
    columns = _round_up(attended, 16 if shape.size == 2 or attended <= 8 else 8)
    scores = 16 * shape.odd_stride(pairs * shape.odd_stride(columns)) + 16
    before = max(length - 1, 7)  # rows of the table
    table = (before + _round_up(length, BAND if length > BAND else 16)) * shape.odd_stride(query)
    if backward:
        queries = shape.tile(query, heads, lines, length)
        values = shape.tile(value, heads, lines, length)
        scalars = queries + 2 * values + (queries if content_keys else 0) + scores + table
        floats = _round_up((2 * length - 1) * shape.key, 4)  # of the table's gradient, at the end
    else:
        scalars = shape.tile(max(query, value), heads, lines, length) + shape.tile(value, heads, lines, length)
        scalars += scores + table
        floats = 0
    sums = 0 if backward else 2 * 16 // shape.size * 256  # of the channels, at the end
    return _round_up(max(scalars * shape.size, 4 * floats, 4 * sums), 16)


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
    eights, tiles = -(-length // 8), _round_up(length, 16) // 16
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


@functools.cache
def plan_context(
    machine: Machine, shape: Shape, pixels: int, images: int, *, softmax: bool, pool: bool
) -> tuple[Launch, ...]:
    """The sums over pixels of content attention, and how their pieces are combined if there are several."""
    widest = max(shape.key, shape.value)
    heads = max(n for n in range(1, shape.heads + 1) if shape.heads % n == 0 and (n == 1 or n * widest <= 64))
    whole = pixels <= CONTEXT_LENGTH and _context_memory(shape, heads, pixels, 1) <= CONTEXT_MEMORY
    # A long way through many pixels wants blocks for all multiprocessors, and several for each.
    wanted = (1 if whole else 3) * machine.multiprocessors
    while heads > 1 and images * shape.heads < heads * wanted:
        heads = max(n for n in range(1, heads) if shape.heads % n == 0)
    length, stages, pieces = pixels, 1, 1
    if not whole:
        length = 16  # at a time
        while length < CONTEXT_LENGTH and _context_memory(shape, heads, length + 16, 2) <= CONTEXT_MEMORY:
            length += 16
        length = _round_up(-(-pixels // -(-pixels // length)), 16)  # all of about one length
        stages, stretches = 2, -(-pixels // length)
        pieces = max(1, min(stretches, wanted * heads // (2 * images * shape.heads)))  # more than one for few images
        pieces = -(-stretches // -(-stretches // pieces))  # none is empty
    shared = _context_memory(shape, heads, length, stages)
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
        constants |= {"WARPS": 8, "BLOCKS": 3}
        combine = specialise("context.cu", "context_combine" if softmax else "context_gradient", **constants)
        elements = shape.padded(shape.key) * shape.padded(shape.value)
        launches.append(Launch(combine, (images * shape.heads, -(-elements // 256) if softmax else 1), 256, 0))
    return tuple(launches)


def _context_memory(shape: Shape, heads: int, length: int, stages: int) -> int:
    tiles = sum(shape.tile(shape.padded(width), heads, 1, length) for width in (shape.key, shape.value))
    return _round_up((stages * tiles + 16) * shape.size, 16)


@functools.cache
def plan_norm(channels: int, entry: str) -> Launch:
    """The statistics of the batch norm (`norm_statistics`) or its gradients (`norm_gradient`)."""
    return _plan_rows(specialise("norm.cu", entry, WARPS=ROW_WARPS, BLOCKS=1), channels, 2)


@functools.cache
def plan_table(dtype: torch.dtype, columns: int) -> Launch:
    """The sum of what the blocks of a line layer's gradient left of the gradient of its table."""
    kernel = specialise("table.cu", "table_gradient", SCALAR=SCALARS[dtype], WARPS=ROW_WARPS, BLOCKS=1)
    return _plan_rows(kernel, columns, 1)


def _plan_rows(kernel: Specialisation, columns: int, numbers: int) -> Launch:
    """Sums over rows, `kernels/rows.cuh`, of so many numbers for each column."""
    threads = 32 * ROW_WARPS
    return Launch(kernel, (-(-columns // 32), 1), threads, numbers * threads * 4)


@functools.cache
def plan_sums(machine: Machine, dtype: torch.dtype, rows: int, channels: int, entry: str) -> tuple[Launch, int]:
    """The sums of a map's channels (`channel_sums`), or those of the gradient of `norm_pool` (`norm_pool_sums`).

    Returns:
        The launch, and how many groups of channels, 16 bytes each, a block takes.
    """
    pooling = entry == "norm_pool_sums"
    # Few blocks: enough accesses on their way, and few sums to add afterwards. The gradient's needs more registers.
    warps, blocks = (8, 3) if pooling else (16, 2)
    width = 16 // dtype.itemsize
    groups = channels // width
    slices = -(-groups // 32)
    groups = -(-groups // slices)
    constants: dict[str, int | str] = {"SCALAR": SCALARS[dtype], "WARPS": warps, "BLOCKS": blocks}
    if pooling:
        constants["NORM"] = 1
    kernel = specialise("norm_pool.cu" if pooling else "channel_sums.cu", entry, **constants)
    at_once = (2 if pooling else 4) * (32 * warps // groups)
    persistent = max(1, machine.multiprocessors * blocks // slices)
    grid = min(-(-rows // at_once), persistent), slices
    shared = 4 * 2 * width * 32 * warps
    # The rest is cache, which all that is on its way goes through.
    carveout = -(-100 * blocks * (shared + 1024) // machine.shared_memory_in_all)
    return Launch(kernel, grid, 32 * warps, shared, carveout), groups


@functools.cache
def plan_pool(
    machine: Machine, dtype: torch.dtype, images: int, height: int, width: int, channels: int, entry: str, norm: bool
) -> tuple[Launch, int]:
    """Max pooling (`norm_pool`) or its gradient (`norm_pool_gradient`), with a batch norm and ReLU or without.

    Returns:
        The launch, and how many rows of windows a thread walks down.
    """
    warps, blocks = 4, 4 if entry == "norm_pool_gradient" else 5 if norm else 7  # as many as registers allow
    down, along = -(-height // 2), -(-width // 2)
    columns = images * along * (channels * dtype.itemsize // 16)
    strip = 8
    while strip > 1 and columns * -(-down // strip) < 4 * machine.multiprocessors * blocks * 32 * warps:
        strip //= 2  # a small batch: rather load some rows twice than leave multiprocessors idle
    kernel = specialise("norm_pool.cu", entry, SCALAR=SCALARS[dtype], WARPS=warps, BLOCKS=blocks, NORM=norm)
    grid = -(-columns * -(-down // strip) // (32 * warps)), 1
    return Launch(kernel, grid, 32 * warps, 0, carveout=0), strip


@functools.cache
def plan_local(entry: str, dtype: torch.dtype, units: int, channels: int, window: int, vector: bool) -> Launch:
    """Local attention, `kernels/local.cu`; `units` are the pixels and heads of what is written."""
    warps = 4
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[dtype],
        "CHANNELS": channels,
        "WINDOW": window,
        "VECTOR": vector,
        "WARPS": warps,
        "BLOCKS": 1,
    }
    threads = 32 * warps
    scores = entry == "local_scores"
    accesses = 1 if scores else channels * dtype.itemsize // 16 if vector else channels
    shared = threads * window**2 * dtype.itemsize if scores else 0
    # Neighbours are read from the cache: as little shared memory as there must be.
    kernel = specialise("local.cu", entry, **constants)
    return Launch(kernel, (-(-units * accesses // threads), 1), threads, shared, carveout=25 if scores else 0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
