"""What goes over maps and not along lines: sums of channels, batch norms, pooling, local attention."""

import functools

import torch

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine

ROW_WARPS = 16  # that share the sums of what other kernels' blocks left
LOCAL_THREADS = 256  # of `local_spread`, at most
LOCAL_MOST = 96 * 2**10  # bytes of shared memory that all machines have for a block, for the scores of `local_scores`
LOCAL_SHARED = 2**15  # bytes of shared memory for the weights of `local_mix`, if more than a row of the window


@functools.cache
def plan_norm(channels: int, entry: str) -> Launch:
    """The statistics of the batch norm (`norm_statistics`) or its gradients (`norm_gradient`)."""
    return plan_rows("norm.cu", entry, channels, 2)


@functools.cache
def plan_kept(channels: int) -> Launch:
    """What a batch norm keeps of its statistics."""
    threads = 32 * ROW_WARPS
    return Launch(
        specialise("norm.cu", "keep_statistics", WARPS=ROW_WARPS, BLOCKS=1), (-(-channels // threads), 1), threads, 0
    )


@functools.cache
def plan_table(dtype: torch.dtype, columns: int) -> Launch:
    """The sum of what the blocks of a gradient left of that of a parameter, such as a line layer's table."""
    return plan_rows("table.cu", "table_gradient", columns, 1, SCALAR=SCALARS[dtype])


def plan_rows(source: str, entry: str, columns: int, numbers: int, **constants: int | str) -> Launch:
    """Sums over rows, `kernels/rows.cuh`, of so many numbers for each column."""
    kernel = specialise(source, entry, WARPS=ROW_WARPS, BLOCKS=1, **constants)
    threads = 32 * ROW_WARPS
    return Launch(kernel, (-(-columns // 32), 1), threads, numbers * threads * 4)


# Sums of channels: the file, warps of a block, blocks, and rows that a thread has on their way. Few blocks: enough
# accesses on their way, and few sums to add afterwards. Those of gradients need more registers.
SUMS = {
    "channel_sums": ("channel_sums.cu", 16, 2, 4),
    "norm_sums": ("norm_sums.cu", 8, 3, 2),
    "norm_pool_sums": ("norm_pool.cu", 8, 3, 2),
}


@functools.cache
def plan_sums(
    machine: Machine, dtype: torch.dtype, rows: int, channels: int, entry: str, **features: bool
) -> tuple[Launch, int]:
    """The sums of a map's channels (`channel_sums`), or those of a norm's gradient (`norm_sums`, `norm_pool_sums`).

    Args:
        machine: The GPU.
        dtype: Of the map.
        rows: Its pixels.
        channels: Its channels.
        entry: The kernel.
        features: The kernel's switches, in lower case.

    Returns:
        The launch, and how many groups of channels, 16 bytes each, a block takes.
    """
    source, warps, blocks, on_their_way = SUMS[entry]
    width = 16 // dtype.itemsize
    groups = channels // width
    slices = -(-groups // 32)
    groups = -(-groups // slices)
    constants: dict[str, int | str] = {"SCALAR": SCALARS[dtype], "WARPS": warps, "BLOCKS": blocks}
    constants |= {name.upper(): int(value) for name, value in features.items()}
    kernel = specialise(source, entry, **constants)
    at_once = on_their_way * (32 * warps // groups)
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
def plan_local(
    entry: str,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    heads: int,
    channels: int,
    window: int,
    vector: bool,
) -> Launch:
    """Local attention, `kernels/local.cu`.

    Args:
        entry: The kernel.
        dtype: Of all maps and weights.
        size: Images, height and width of what is written.
        heads: Of all maps.
        channels: Of a head.
        window: Pixels of its side.
        vector: Whether maps are moved by 16 bytes.
    """
    access = 16 // dtype.itemsize if vector else channels if channels <= 4 else 1
    accesses = channels // access
    images, height, width = size
    warps, rows, pixels, heads_at_once = 4, 1, 1, 1
    grid = (-(-images * height * width * heads * accesses // (32 * warps)), 1)
    if entry == "local_scores":
        a_thread = window**2 * dtype.itemsize
        warps = 4 if 128 * a_thread <= LOCAL_MOST else 2
        grid = (-(-images * height * width * heads // (32 * warps)), 1)
        shared = 32 * warps * a_thread
    elif entry == "local_mix":
        row = ((32 * warps - 1) // accesses + 2) * window * dtype.itemsize
        rows = window if row * window <= LOCAL_SHARED else 1
        shared = rows * row
    else:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        # Whole lines of the cache, then whole rows of the map, then more heads.
        side_by_side = next((n for n in divisors if n * channels * dtype.itemsize >= 128), heads)
        pixels = min(width, max(1, LOCAL_THREADS // (accesses * side_by_side)))
        heads_at_once = max([n for n in divisors if n * pixels * accesses <= LOCAL_THREADS], default=1)
        warps = -(-pixels * heads_at_once * accesses // 32)
        grid = (images * height * -(-width // pixels), heads // heads_at_once)
        shared = (pixels + window - 1) * heads_at_once * window * dtype.itemsize
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[dtype],
        "CHANNELS": channels,
        "WINDOW": window,
        "VECTOR": vector,
        "WARPS": warps,
        "BLOCKS": 1,
        "ROWS": rows,
        "PIXELS": pixels,
        "HEADS": heads_at_once,
    }
    # Neighbours are read from the cache: no more shared memory than there must be.
    kernel = specialise("local.cu", entry, **constants)
    return Launch(kernel, grid, 32 * warps, shared, carveout=50 if entry == "local_mix" else 25)
