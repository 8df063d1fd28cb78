"""Programmatic dependent launches: a kernel is set up while the one before it in the stream still runs.

Between two ordinary kernels the GPU takes about a microsecond to launch the second, where kernels for one image run for
three to six. From compute capability 9.0 on it launches a kernel early if that waits by itself for what was before it.
Each of ours does (`take_turn` of `kernels/intrinsics.cuh`). Why that is safe, and why it is done only where it is asked
for: `docs/kernels.md`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Of the GPU, its first number. Graphs have such launches from drivers of CUDA 12.3 on; loading a kernel needs 12.4.
CAPABILITY = 9
MOST_SHAPES = 256  # kept for each kernel

wanted = True  # whether kernels are launched so where they can be; read at each launch
_refused = False


@contextmanager
def dependent_launches(on: bool) -> Iterator[None]:
    """Launch kernels so, or as usual, in all threads. A CUDA graph stays as it was captured."""
    global wanted
    before, wanted = wanted, on and not _refused
    try:
        yield
    finally:
        wanted = before and not _refused


def refuse() -> None:
    """From now on launch as usual: the driver does not want it otherwise."""
    global wanted, _refused
    wanted, _refused = False, True


Shape = tuple[int, int, int, int, int, int]  # blocks in x, y and z, threads, bytes of dynamic shared memory, the stream


class Configurations(dict[Shape, Any]):
    """What the driver is to know of a launch, made when it is first asked for: that takes longer than a launch."""

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self._driver = driver

    def __missing__(self, shape: Shape) -> Any:
        """Make it."""
        if len(self) >= MOST_SHAPES:
            self.clear()
        made = self[shape] = self._make(*shape)
        return made

    def _make(self, x: int, y: int, z: int, threads: int, shared_bytes: int, stream: int) -> Any:
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        made = driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = x, y, z
        made.blockDimX, made.blockDimY, made.blockDimZ = threads, 1, 1
        made.sharedMemBytes = shared_bytes
        made.hStream = driver.CUstream(stream)
        made.attrs = [attribute]  # copied
        made.numAttrs = 1
        return made
