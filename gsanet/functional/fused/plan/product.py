"""Products of few rows, 1x1 convolutions and projections of one image or a few: `kernels/product.cu`."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gsanet.functional.fused.compiler import specialise
from gsanet.functional.fused.plan.shape import SCALARS, Launch, Machine, Shape

# Up to how many blocks for each multiprocessor the kernel is the plan; 0: never. With more, cuDNN and cuBLAS are
# better, which read less for each product. `python benchmarks/products.py` times both ways.
MOST_BLOCKS = 6

# Of a multiprocessor, in clocks: guesses that only the choice of a cut depends on.
BYTES_PER_CLOCK = 24  # from the cache, if all multiprocessors read
EARLY = 0.5  # of the weight's time, as it is on its way before the pixels are
SHARED_BYTES_PER_CLOCK = 128
PRODUCT = 6.5  # one of 16 x 8 x 16, on a quarter of the multiprocessor
STEP = 40  # what a warp waits for its operands
COPY = 6  # instructions for 16 bytes
CHUNK = 100  # a barrier more, and copies in shorter pieces
ANOTHER_WAVE = 1000  # of blocks that do not fit at once

THREADS = 2048  # of a multiprocessor
BLOCK_THREADS = range(128, 513)


class Cut(NamedTuple):
    """How the output is shared: pixels and columns of a block, of these of a warp, and parts of the sum.

    The channels arrive all at once, or as two chunks.
    """

    length: int
    columns: int
    down: int
    along: int
    parts: int
    chunks: int = 1

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.length // self.down * (self.columns // self.along) * self.parts

    def shared_bytes(self, channels: int) -> int:
        """Both operands, and later the sums of all parts."""
        row = Shape(torch.bfloat16, 1, channels, channels, vector=True).odd_stride(channels)
        return max(2 * (self.length + self.columns) * row, 4 * self.parts * self.length * (self.columns + 8))

    def blocks(self, pixels: int, columns: int) -> tuple[int, int]:
        """How many there are, down and along."""
        return -(-pixels // self.length), -(-columns // self.columns)


def _cuts(channels: int) -> Iterator[Cut]:
    sizes = itertools.product((16, 32, 64), (16, 32, 64), (16, 32), (16, 32), (1, 2, 4, 8, 16), (1, 2))
    for cut in itertools.starmap(Cut, sizes):
        whole = cut.length % cut.down == 0 and cut.columns % cut.along == 0
        if whole and channels // 16 % (cut.parts * cut.chunks) == 0 and 32 * cut.warps in BLOCK_THREADS:
            yield cut


def _clocks(machine: Machine, cut: Cut, pixels: int, channels: int, columns: int) -> float:
    """About how long the busiest multiprocessor is at work, but for what is the same for all cuts."""
    down, along = cut.blocks(pixels, columns)
    busiest = -(-down * along // machine.multiprocessors)
    threads = 32 * cut.warps
    fit = min(machine.blocks_of(cut.shared_bytes(channels)), THREADS // threads)
    operands = 2 * channels * (cut.length + cut.columns)
    load = 2 * channels * (cut.length + EARLY * cut.columns) / BYTES_PER_CLOCK + COPY * operands / 16 / 32 / 4
    steps, fragments = channels // 16, cut.down // 16 * (cut.along // 8)
    products = fragments * cut.warps // cut.parts * steps * PRODUCT / 4
    read = cut.warps // cut.parts * 2 * channels * (cut.down + cut.along) / SHARED_BYTES_PER_CLOCK
    one_warp = steps // cut.parts * (STEP + PRODUCT * fragments)
    sums = 2 * 4 * cut.parts * cut.length * cut.columns / SHARED_BYTES_PER_CLOCK
    waves = -(-busiest // fit)
    # Of several chunks, or several blocks, all but the last are multiplied while others arrive.
    multiplied = max(busiest * products, busiest * read, one_warp) / (cut.chunks * min(busiest, fit))
    chunks = CHUNK * (cut.chunks - 1)
    return busiest * (load + sums) + multiplied + chunks + (waves - 1) * ANOTHER_WAVE


@functools.cache
def cut_product(machine: Machine, pixels: int, channels: int, columns: int) -> Cut | None:
    """The cut for so many rows of so many channels, in 16 bits; None where other kernels are better."""
    if channels % 16 or columns % 8 or pixels == 0:
        return None
    fitting = [cut for cut in _cuts(channels) if cut.shared_bytes(channels) <= machine.shared_memory]
    if not fitting:
        return None
    best = min(fitting, key=lambda cut: _clocks(machine, cut, pixels, channels, columns))
    down, along = best.blocks(pixels, columns)
    return best if down * along <= MOST_BLOCKS * machine.multiprocessors else None


@functools.cache
def plan_product(
    machine: Machine,
    dtype: torch.dtype,
    pixels: int,
    channels: int,
    columns: int,
    *,
    bias: bool,
    residual: bool,
    relu: bool,
    strided: bool,
    early_weight: bool,
) -> Launch | None:
    """How a product is computed, or None where `cut_product` says so or the scalars are not of 16 bits.

    Args:
        machine: The GPU.
        dtype: Of all operands.
        pixels: Rows of the output.
        channels: The length of its sums.
        columns: Of the output.
        bias: Whether one is added to each column.
        residual: Whether a map is added.
        relu: Whether a ReLU follows.
        strided: The rows of x are not at one distance.
        early_weight: Weight and bias are older than the kernel before this one, which is one of ours.
    """
    cut = cut_product(machine, pixels, channels, columns) if dtype.itemsize == 2 else None
    if cut is None:
        return None
    constants: dict[str, int | str] = {
        "SCALAR": SCALARS[dtype],
        "LENGTH": cut.length,
        "COLUMNS": cut.columns,
        "CHANNELS": channels,
        "DOWN": cut.down,
        "ALONG": cut.along,
        "CHUNKS": cut.chunks,
        "HEADS": 1,
        "LINES": 1,
        "WARPS": cut.warps,
        "BLOCKS": max(1, BLOCK_THREADS[-1] // (32 * cut.warps)),
        "VECTOR": True,
        "BIAS": bias,
        "RESIDUAL": residual,
        "RELU": relu,
        "STRIDED": strided,
        "EARLY_WEIGHT": early_weight,
    }
    kernel = specialise("product.cu", "product", **constants)
    return Launch(kernel, cut.blocks(pixels, columns), 32 * cut.warps, cut.shared_bytes(channels))
