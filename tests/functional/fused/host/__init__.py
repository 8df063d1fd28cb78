"""The kernels' own source built for the host, and run on CPU tensors: see machine.h and races.h for what it finds.

What all kernels call is built once (runtime.cpp). A kernel's own build is then short: it sees no standard header but
two small ones.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path

import torch

import gsanet

HOST = Path(__file__).parent
KERNELS = Path(gsanet.__file__).parent / "functional" / "fused" / "kernels"

COMPILER = os.environ.get("CXX", "g++")
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fno-strict-aliasing",  # device compilers let words be read as pairs of scalars
    "-ffp-contract=off",
    "-w",
)
# Devices stop at misaligned addresses, and their threads are in no order. The runtime has the functions that these
# call: no library is needed.
CHECKS = (
    "-O1",
    "-fsanitize=alignment,bounds,thread",
    "-fno-sanitize-recover=all",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
    "--param=tsan-instrument-func-entry-exit=0",
)

KERNEL = 'extern "C" __attribute__((used, noinline)) void'  # what the macro of this name becomes

_one_at_a_time = threading.Lock()


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid_x", ctypes.c_int),
        ("grid_y", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("order", ctypes.c_int),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
    )


def launch(
    source: str,
    entry: str,
    constants: dict[str, int | str],
    grid: int | tuple[int, int],
    threads: int,
    shared_bytes: int,
    arguments: ctypes.Structure,
    order: str = "forward",
    folder: Path = KERNELS,
) -> None:
    """Run all blocks of a kernel.

    Args:
        source: The file's name in `folder`.
        entry: The kernel's name.
        constants: Macros to define.
        grid: Blocks: how many, or (in x, in y).
        threads: Threads of a block, a multiple of 32.
        shared_bytes: Shared memory of a block.
        arguments: The kernel's parameter; its pointers are addresses of CPU tensors.
        order: In which order lanes, warps and blocks run where they do not wait for each other: "forward", "reverse",
            or "random" with a seed, as in "random:3". Background copies are done as late as possible in forward order,
            as early as possible in reverse, and the one or the other by chance in random order.
        folder: Where the source lies.

    Raises:
        RuntimeError: If it does not compile, or does not run as it should.
    """
    kind, _, seed = order.partition(":")
    run = getattr(_build(folder / source, entry, tuple(sorted(constants.items()))), f"run_{entry}")
    run.restype = ctypes.c_char_p
    grid_x, grid_y = grid if isinstance(grid, tuple) else (grid, 1)
    options = _Launch(
        grid_x, grid_y, threads, ("forward", "reverse", "random").index(kind), shared_bytes, int(seed or 0)
    )
    with _one_at_a_time:
        error = run(ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments)), ctypes.byref(options))
    if error is not None:
        raise RuntimeError(f"{source}, {entry}: {error.decode()}")


@functools.cache
def _build(source: Path, entry: str, constants: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    text = f'#include <intrinsics.cuh>\n#include "{source}"\n'
    # This folder comes first, so that its intrinsics.cuh is the one the kernels include.
    folders = (f"-I{HOST}", f"-I{source.parent}", f"-I{KERNELS}")
    text = _preprocess(text, *folders, *(f"-D{name}={value}" for name, value in constants))
    for folder in (HOST, source.parent, KERNELS):  # the same in any place
        text = text.replace(f"{folder}/", "")
    if entry not in re.findall(rf"{re.escape(KERNEL)}\s+(\w+)", text):
        raise RuntimeError(f"{source.name} has no kernel {entry}")
    # The source's other kernels become functions that nobody calls: nothing is made of them.
    text = re.sub(rf"{re.escape(KERNEL)}(?!\s+{entry}\b)", "static inline void", text)
    text += (
        f'\nextern "C" const char* run_{entry}(const void* bytes, size_t size, const host::Launch* launch) '
        f"{{ return host::run({entry}, bytes, size, *launch); }}"
    )
    checks = CHECKS
    if int(_version().split(".")[0]) >= 12:
        checks += ("-ftrivial-auto-var-init=pattern",)  # registers that are read before they are set show
    return ctypes.CDLL(str(_library(text, checks, ("-nostdlib", str(_runtime()), "-lm"))))


@functools.cache
def _runtime() -> Path:
    text = _preprocess((HOST / "runtime.cpp").read_text(), f"-I{HOST}").replace(f"{HOST}/", "")
    return _library(text, ("-O2",), ())


@functools.cache
def _version() -> str:
    return _compile("-dumpversion", text="")


def _preprocess(text: str, *options: str) -> str:
    """Preprocessed, the text is all that the result depends on."""
    return _compile("-E", "-x", "c++", "-", *FLAGS, *options, text=text)


def _library(text: str, options: tuple[str, ...], linked: tuple[str, ...]) -> Path:
    """Build the text, if nobody has; the file."""
    key = "\0".join((COMPILER, _version(), *FLAGS, *options, *linked, text))
    cache = Path(tempfile.gettempdir()) / f"gsanet-host-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    built = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if not built.exists():
        # Other processes may build the same: each under its own name, and the last to rename wins.
        with tempfile.TemporaryDirectory(dir=cache) as own:
            _compile("-c", "-x", "c++-cpp-output", "-", "-o", f"{own}/built.o", *FLAGS, *options, text=text)
            _compile("-shared", f"{own}/built.o", *linked, "-o", f"{own}/built.so", text="")
            os.replace(f"{own}/built.so", built)
    return built


def _compile(*options: str, text: str) -> str:
    done = subprocess.run([COMPILER, *options], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to memory of its own, where an access beyond its end (or far before its start) is an error."""
    page = mmap.PAGESIZE
    bytes_used = -(-tensor.numel() * tensor.element_size() // 16) * 16  # a start at a multiple of 16
    pages = -(-bytes_used // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=(1 + pages) * page - bytes_used
    ).view(tensor.shape)
    copy.copy_(tensor)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for closed in (start, start + (1 + pages) * page):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(closed), ctypes.c_size_t(page), 0):
            raise OSError("mprotect")
    return copy
