"""What a plan depends on, the GPU and the layer, and what it is: a kernel and how it is started."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gsanet.functional.fused.compiler import Specialisation

SCALARS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
WIDTHS = range(4, 129)  # channels of a head


@dataclass(frozen=True)
class Machine:
    """What a plan depends on, of a GPU."""

    multiprocessors: int
    shared_memory: int  # bytes that one block may have
    shared_memory_in_all: int  # of a multiprocessor

    def blocks_of(self, shared: int) -> int:
        """How many blocks fit on a multiprocessor: each takes a kilobyte more than it asks for."""
        return self.shared_memory_in_all // (shared + 1024)

    def stages_of(self, shared: Callable[[int], int], most: int, blocks: int) -> tuple[int, int] | None:
        """Stages of a block in shared memory, and blocks on a multiprocessor; None if not even two stages fit.

        Args:
            shared: Bytes that so many stages take.
            most: Stages that are wanted; where they do not fit there are fewer, or fewer blocks.
            blocks: The same; rather so many blocks than so many stages.
        """
        fitting = [stages for stages in range(2, most + 1) if shared(stages) <= self.shared_memory]
        together = [(min(blocks, self.blocks_of(shared(stages))), stages) for stages in fitting]
        return max(together)[::-1] if together else None


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
        return round_up(width, 8 if self.size == 4 or width <= 8 else 16)

    def odd_stride(self, width: int) -> int:
        """The distance of rows in shared memory."""
        accesses = -(-width * self.size // 16)
        return (accesses + 1 - accesses % 2) * 16 // self.size

    def tile(self, width: int, heads: int, lines: int, length: int) -> int:
        """Scalars of a tile of lines, heads and padded channels."""
        head = self.odd_stride(width) if width >= 32 else width
        row = self.odd_stride(heads * head)
        if lines == 1 or length > 8:
            return lines * round_up(length, 16) * row
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


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple
