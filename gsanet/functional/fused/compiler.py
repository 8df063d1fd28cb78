"""CUDA C++ kernels compiled at first use, kept on disk, loaded and launched.

The compiler is NVRTC, which torch's CUDA packages bring together with its Python bindings: a user needs no compiler
and no CUDA toolkit. A kernel is compiled for the shape it is used with and for the GPU it runs on, in a fraction of a
second to a few seconds, once for each user.

Environment:
    GSANET_CACHE: The folder of the compiled kernels. By default `gsanet/kernels` in `$XDG_CACHE_HOME` or `~/.cache`.
"""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import Structure, addressof, c_char_p, c_void_p, sizeof
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gsanet.functional.fused import dependent
from gsanet.functional.fused.cache import read_entry, write_entry

KERNELS = Path(__file__).parent / "kernels"

# ptxas reports the registers and spills of each kernel only when asked to; the report is a part of NVRTC's log.
_OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
_FORMAT = 1  # of the files in the cache
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Specialisation:
    """One kernel made for one shape: a source file, its entry point, and the constants it is compiled with."""

    source: str
    entry: str
    constants: tuple[tuple[str, int | str], ...]

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.entry} of {self.source} ({constants})"


def specialise(source: str, entry: str, /, **constants: int | str) -> Specialisation:
    """The specialisation with these constants, each a macro of the source; True and False become 1 and 0."""
    values = {name: int(value) if isinstance(value, bool) else value for name, value in constants.items()}
    return Specialisation(source, entry, tuple(sorted(values.items())))


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: machine code of one architecture, and what the entry point takes, in bytes but for registers.

    `shared` is the static shared memory; `log` is the compiler's own report.
    """

    image: bytes
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    log: str


def compile_binary(specialisation: Specialisation, architecture: str) -> Binary:
    """Compile a kernel, without a cache. Needs no GPU.

    Args:
        specialisation: The kernel.
        architecture: `"sm_80"`, `"sm_90"`, ...: real machines, not virtual ones.
    """
    nvrtc = _nvrtc()
    # The headers go in as text, not as a folder: what is compiled is what the key of the cache is made of.
    texts = _read_sources(specialisation.source)
    text = texts.pop(specialisation.source)
    defines = (f"-D{name}={value}" for name, value in specialisation.constants)
    # From 12.9 on, NVRTC has a cache of its own where there is a driver, and what it finds there comes without a log.
    uncached = ("--no-cache",) if tuple(nvrtc.nvrtcVersion()[1:]) >= (12, 9) else ()
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_OPTIONS, *uncached, *defines)]
    names = tuple(name.encode() for name in texts)

    def call(name: str, *arguments: Any) -> Any:
        status, *values = getattr(nvrtc, name)(*arguments)
        if status:
            raise RuntimeError(f"{specialisation}: {name} failed with {status.name}")
        return values[0] if values else None

    program = call("nvrtcCreateProgram", text, specialisation.source.encode(), len(texts), tuple(texts.values()), names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytes(call("nvrtcGetProgramLogSize", program))
        call("nvrtcGetProgramLog", program, log)
        report = log.rstrip(b"\0").decode(errors="replace")
        if status:
            raise RuntimeError(
                f"{specialisation} does not compile for {architecture}: {_first_errors(report) or status.name}"
            )
        image = bytes(call("nvrtcGetCUBINSize", program))
        call("nvrtcGetCUBIN", program, image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return _describe(specialisation, image, report)


def _read_sources(source: str) -> dict[str, bytes]:
    """The text of a source and of all that it includes, by name. A missing header is left for the compiler to name."""
    texts = {source: (KERNELS / source).read_bytes()}
    pending = [texts[source]]
    while pending:
        for name in map(bytes.decode, _INCLUDE.findall(pending.pop())):
            if name not in texts and (KERNELS / name).is_file():
                texts[name] = (KERNELS / name).read_bytes()
                pending.append(texts[name])
    return texts


def _first_errors(report: str, lines: int = 8) -> str:
    """The compiler's report from the first error on, without the warnings before it."""
    found = re.search(r"^.*\berror\b", report, re.MULTILINE)
    return "\n".join(report[found.start() if found else 0 :].splitlines()[:lines])


def _describe(specialisation: Specialisation, image: bytes, report: str) -> Binary:
    """Read what ptxas says about the entry point; a source may have others."""
    _, _, section = report.partition(f"Compiling entry function '{specialisation.entry}' for")
    section, _, _ = section.partition("Compiling entry function")

    def number(pattern: str) -> int:
        found = re.search(rf"(\d+) {pattern}", section)
        return int(found[1]) if found else 0

    if not number("registers"):
        raise RuntimeError(
            f'{specialisation}: the compiler reports no {specialisation.entry}: it must be an extern "C" __global__'
        )
    return Binary(
        image=image,
        registers=number("registers"),
        spill_stores=number("bytes spill stores"),
        spill_loads=number("bytes spill loads"),
        stack=number("bytes stack frame"),
        shared=number("bytes smem"),
        log=report,
    )


_binaries: dict[tuple[Specialisation, str], Binary] = {}
_compiling: dict[tuple[Specialisation, str], threading.Lock] = {}


def cached_binary(specialisation: Specialisation, architecture: str) -> Binary:
    """A compiled kernel from memory, or from disk, or compiled now and kept in both."""
    wanted = (specialisation, architecture)
    with _compiling.setdefault(wanted, threading.Lock()):  # a second thread waits rather than compile the same
        if wanted not in _binaries:
            key = _key(specialisation, architecture)
            if (entry := read_entry(key)) is not None:
                header, image = entry
                _binaries[wanted] = Binary(image=image, **header)
            else:
                binary = _binaries[wanted] = compile_binary(specialisation, architecture)
                header = asdict(binary)
                write_entry(key, header, header.pop("image"))
        return _binaries[wanted]


def compile_all(
    specialisations: Iterable[Specialisation], architecture: str, workers: int | None = None
) -> dict[Specialisation, Binary]:
    """Compile several kernels at once, as `cached_binary` does each: NVRTC runs in as many threads as there are."""
    wanted = list(dict.fromkeys(specialisations))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(wanted, pool.map(lambda one: cached_binary(one, architecture), wanted), strict=True))


def _key(specialisation: Specialisation, architecture: str) -> str:
    """A name for everything the compiled kernel depends on."""
    parts = {
        "format": _FORMAT,
        "entry": specialisation.entry,
        "constants": specialisation.constants,
        "architecture": architecture,
        "compiler": _nvrtc().nvrtcVersion(),
        "options": _OPTIONS,
        "source": specialisation.source,
        "texts": {name: text.decode() for name, text in _read_sources(specialisation.source).items()},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def unavailable(device: torch.device | None = None) -> str | None:
    """Why kernels cannot be compiled here, in one line, or None if they can.

    Args:
        device: Also answer for this GPU.
    """
    try:
        _nvrtc().nvrtcVersion()
    except ImportError:
        return "the package cuda-bindings is not installed: newer CUDA builds of torch bring it"
    except (RuntimeError, OSError) as error:
        return f"NVRTC cannot be loaded: {str(error).splitlines()[0]}"
    try:
        if device is not None:
            architecture_of(device)
    except RuntimeError as error:
        return str(error)
    return None


def _nvrtc() -> Any:
    return import_module("cuda.bindings.nvrtc")


def _driver() -> Any:
    return import_module("cuda.bindings.driver")


@functools.cache
def architecture_of(device: torch.device) -> str:
    """The architecture to compile for so that it runs on a GPU."""
    _, supported = _nvrtc().nvrtcGetSupportedArchs()
    return choose_architecture(torch.cuda.get_device_capability(device), supported)


def choose_architecture(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """The best architecture for a GPU: its own, or an older one of the same generation, whose code it runs too.

    Args:
        capability: Of the GPU, such as (8, 6).
        supported: What the compiler knows, such as [80, 86, 90].
    """
    major, minor = capability
    if major < 8:
        raise RuntimeError(f"the kernels need a GPU of compute capability 8.0 or more, this one has {major}.{minor}")
    candidates = [number for number in supported if number // 10 == major and number % 10 <= minor]
    if not candidates:
        raise RuntimeError(f"this torch's NVRTC does not know GPUs of compute capability {major}.{minor}: update torch")
    return f"sm_{max(candidates)}"


class Kernel:
    """A kernel loaded on one device; made by `load_kernel`.

    It may be launched before the one before it has finished (`dependent.py`): it must call `take_turn`, as
    `kernels/intrinsics.cuh` says.
    """

    def __init__(
        self, specialisation: Specialisation, binary: Binary, index: int, driver: Any, carveout: int = 100
    ) -> None:
        self.specialisation = specialisation
        self.binary = binary
        self._driver = driver
        self._launch = driver.cuLaunchKernel
        self._launch_early = driver.cuLaunchKernelEx
        self._checked_type: type | None = None
        self._parameters: tuple[int, int, c_void_p | None] = (0, 0, None)
        self._max_blocks: dict[tuple[int, int], int] = {}
        device = self._call("cuDeviceGet", index)
        major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        early = self._call("cuDeviceGetAttribute", major, device) >= dependent.CAPABILITY
        self._configurations = dependent.Configurations(driver) if early else None
        # torch uses the primary context too: its streams and memory are ours.
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        with self._current_context():
            self._module = self._call("cuModuleLoadData", binary.image)
            self._function = self._call("cuModuleGetFunction", self._module, specialisation.entry.encode())
            _, self._argument_bytes = self._call("cuFuncGetParamInfo", self._function, 0)
            # All that the device allows, once: more than 48 KB is refused otherwise, and a launch need not ask.
            limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            available = self._call("cuDeviceGetAttribute", limit, device) - binary.shared
            self._call("cuFuncSetAttribute", self._function, dynamic, available)
            # Or the driver may leave room for fewer blocks than would fit.
            preferred = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._call("cuFuncSetAttribute", self._function, preferred, carveout)

    def launch(
        self,
        grid: int | tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: bytes | Structure,
        stream: int,
    ) -> None:
        """Launch the kernel; it may be captured in a CUDA graph.

        Args:
            grid: Number of blocks.
            threads: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
            arguments: The kernel's only parameter, a struct, laid out as there. Copied before this returns.
            stream: The stream's handle, `torch.cuda.current_stream(device).cuda_stream`.
        """
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        # The driver wants an array of pointers to the parameters, here one.
        if isinstance(arguments, bytes):
            self._check_size(len(arguments))
            text = c_char_p(arguments)
            parameters = addressof(text)
        else:
            if type(arguments) is not self._checked_type:
                self._check_size(sizeof(arguments))
                self._checked_type = type(arguments)
            # Kept for the next launch, which often has its struct in the same place. Two threads may be here at once:
            # an array is never changed, and this thread holds on to its own.
            address = addressof(arguments)
            known, parameters, array = self._parameters
            if known != address:
                array = c_void_p(address)
                parameters = addressof(array)
                self._parameters = (address, parameters, array)
        configuration = None
        if self._configurations is not None and dependent.wanted:
            configuration = self._configurations[x, y, z, threads, shared_bytes, stream]
            (status,) = self._launch_early(configuration, self._function, parameters, 0)
        else:
            (status,) = self._launch(self._function, x, y, z, threads, 1, 1, shared_bytes, stream, parameters, 0)
        if status:
            # A thread that has not used the GPU yet has no context, and another device's may be current.
            with self._current_context():
                if configuration is not None:
                    (status,) = self._launch_early(configuration, self._function, parameters, 0)
                if status:
                    shape = (x, y, z, threads, 1, 1, shared_bytes)
                    self._call("cuLaunchKernel", self._function, *shape, stream, parameters, 0)
                    if configuration is not None:
                        dependent.refuse()

    def max_blocks_per_multiprocessor(self, threads: int, shared_bytes: int) -> int:
        """How many blocks of this many threads and bytes of dynamic shared memory one multiprocessor holds."""
        wanted = (threads, shared_bytes)
        if wanted not in self._max_blocks:
            with self._current_context():
                self._max_blocks[wanted] = self._call(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor", self._function, *wanted
                )
        return self._max_blocks[wanted]

    def _check_size(self, size: int) -> None:
        if size != self._argument_bytes:
            raise ValueError(
                f"{self.specialisation} takes a struct of {self._argument_bytes} bytes, got {size}: the layouts differ"
            )

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; an error is raised with its name and the kernel's."""
        status, *values = getattr(self._driver, name)(*arguments)
        if status:
            words = (self._driver.cuGetErrorName(status)[1], self._driver.cuGetErrorString(status)[1])
            meaning = ": ".join(word.decode() for word in words)
            shape = ""
            if name == "cuLaunchKernel":
                x, y, z, threads, _, _, shared_bytes, *_ = arguments[1:]
                shape = f" (grid {x} x {y} x {z}, {threads} threads, {shared_bytes} bytes of shared memory)"
            raise RuntimeError(f"{self.specialisation}: {name} failed with {meaning}{shape}")
        return values[0] if len(values) == 1 else tuple(values)


_kernels: dict[tuple[Specialisation, int], Kernel] = {}
_loading = threading.Lock()


def load_kernel(specialisation: Specialisation, device: torch.device, carveout: int = 100) -> Kernel:
    """A kernel ready to be launched on a device, compiled if it is not yet; the same object each time.

    Args:
        specialisation: The kernel.
        device: The GPU.
        carveout: How much of a multiprocessor's memory is to be shared memory and not cache, in percent of what can be;
            what it is when the kernel is loaded counts.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    wanted = (specialisation, index)
    if (kernel := _kernels.get(wanted)) is None:
        binary = cached_binary(specialisation, architecture_of(torch.device("cuda", index)))
        with _loading:
            if (kernel := _kernels.get(wanted)) is None:
                kernel = _kernels[wanted] = Kernel(specialisation, binary, index, _driver(), carveout)
    return kernel
