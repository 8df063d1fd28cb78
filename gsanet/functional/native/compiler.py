"""C++ kernels for CPUs, compiled at first use by the compiler that is there, kept on disk, and loaded.

They include no headers but the compiler's own, so that all of them compile in some seconds, for the machine at hand,
and serve all shapes. Without a compiler, or where it fails, the backend `torch` does the work.

Environment:
    CXX: The compiler. By default the first of `c++`, `g++` and `clang++` that is found.
    GSANET_CACHE: The folder of the compiled kernels, as for those of GPUs.
"""

import ctypes
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gsanet.functional.fused.cache import read_entry, write_entry

KERNELS = Path(__file__).parent / "kernels"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC")
# The machine at hand, in the words of compilers: on ARM clang 14 knows only the second, and compilers that build for
# another machine than they run on know neither.
MACHINES = (("-march=native",), ("-mcpu=native",), ())
ENTRIES = (
    "use_threads",
    "attend_along_lines",
    "differentiate_along_lines",
    "context_vectors",
    "differentiate_context_vectors",
    "attend_as_module",
    "convolve_pointwise",
)
_FORMAT = 1  # of the files in the cache
_lock = threading.Lock()


class UnavailableError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why in one line."""


def unavailable() -> str | None:
    """Why the kernels cannot run here, in one line, or None if they can. Compiles them if nobody has."""
    with _lock:  # a second thread waits rather than compile the same
        return _outcome()[1]


def library() -> ctypes.CDLL:
    """The kernels."""
    with _lock:
        loaded, reason = _outcome()
    if loaded is None:
        raise UnavailableError(reason)
    return loaded


@functools.cache
def _outcome() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return load(build(find_compiler())), None
    except UnavailableError as error:
        return None, str(error)


def find_compiler() -> list[str]:
    """The C++ compiler, as the beginning of a command: `CXX` may have options too."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise UnavailableError(f"CXX names the C++ compiler {chosen[0]!r}, which is not found")
        return chosen
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise UnavailableError(f"no C++ compiler is found, neither CXX nor {', '.join(COMPILERS)}")


def build(compiler: Sequence[str]) -> bytes:
    """The kernels as a shared library, from the cache or compiled now and kept there."""
    sources = {file.name: file.read_text() for file in sorted(KERNELS.iterdir()) if file.suffix in (".cpp", ".h")}
    flags, target = _flags(compiler)
    parts = {"format": _FORMAT, "flags": flags, "compiler": list(compiler), "target": target, "sources": sources}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    if (entry := read_entry(key)) is not None:
        return entry[1]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in sources.items():  # what is compiled is what the key is made of
            Path(folder, name).write_text(text)
        built = Path(folder, "kernels.so")
        units = [str(Path(folder, name)) for name in sources if name.endswith(".cpp")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(functools.partial(_compile, compiler, flags), units))
        _run([*compiler, *flags, "-shared", *objects, "-o", str(built)])
        image = built.read_bytes()
    write_entry(key, {}, image)
    return image


def _compile(compiler: Sequence[str], flags: Sequence[str], unit: str) -> str:
    """Compile one file, to one beside it."""
    _run([*compiler, *flags, "-c", unit, "-o", f"{unit}.o"])
    return f"{unit}.o"


def _flags(compiler: Sequence[str]) -> tuple[list[str], str]:
    """The flags that a compiler knows, and what it defines by itself: its version, and what the machine can do."""
    for machine in MACHINES:
        flags = [*FLAGS, *machine]
        try:
            return flags, _run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
        except UnavailableError as error:
            failure = error
    raise failure


def load(image: bytes) -> ctypes.CDLL:
    """Load a shared library, which needs a file for that moment only."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernels.so")
            file.write_bytes(image)
            loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise UnavailableError(f"the compiled kernels cannot be loaded: {error}") from error
    for name in ENTRIES:
        getattr(loaded, name).restype = None
    loaded.use_threads(_parallel())
    return loaded


def _parallel() -> ctypes.c_void_p:
    """`GOMP_parallel` of the OpenMP that PyTorch calls: found as its libraries find it, whatever its file is named."""
    for file in (None, torch._C.__file__):  # what all libraries see, then what PyTorch's have loaded for themselves
        try:
            return ctypes.cast(ctypes.CDLL(file).GOMP_parallel, ctypes.c_void_p)
        except (AttributeError, OSError, TypeError):  # TypeError: a system where None stands for nothing
            continue
    raise UnavailableError("PyTorch's threads are not those of an OpenMP that the kernels could call")


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UnavailableError(f"the C++ compiler {command[0]!r} does not run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"status {done.returncode}")
        raise UnavailableError(f"the C++ compiler {command[0]!r} fails: {first}")
    return done.stdout
