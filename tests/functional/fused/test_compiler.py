"""Kernels from source to launch: compiled, kept on disk, loaded. A fake driver stands in for a GPU."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch

from gsanet.functional.fused import cache, compiler, dependent
from gsanet.functional.fused.compiler import (
    Binary,
    Kernel,
    cached_binary,
    choose_architecture,
    compile_all,
    compile_binary,
    load_kernel,
    specialise,
    unavailable,
)

ROOT = Path(__file__).parents[3]

needs_nvrtc = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or unavailable() is not None, reason="no GPU")

SCALE = """
#include "types.cuh"

extern "C" __global__ void scale(const __grid_constant__ Arguments arguments) {
    extern __shared__ float dynamic[];
    __shared__ float fixed[FIXED];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    fixed[threadIdx.x % FIXED] = i;
    __syncthreads();
    if (i < arguments.count) {
        dynamic[threadIdx.x] = arguments.data[i] + 0 * fixed[(threadIdx.x + 1) % FIXED];
        arguments.data[i] = FACTOR * dynamic[threadIdx.x];
    }
}
"""
# 64 live values in 32 registers.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* data) {
    float values[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) values[i] = data[i * 1024 + threadIdx.x];
    #pragma unroll 1
    for (int step = 0; step < 9; step++) {
        #pragma unroll
        for (int i = 0; i < 64; i++) values[i] = values[i] * values[(i + 7) % 64] + step;
    }
    #pragma unroll
    for (int i = 0; i < 64; i++) data[i * 1024 + threadIdx.x] = values[i];
}
extern "C" __global__ void light(float* data) { data[threadIdx.x] = 1; }
"""
SOURCES = {
    "scale.cu": SCALE,
    "types.cuh": '#pragma once\n#include "deeper.cuh"\nstruct Arguments { float* data; int count; };\n',
    "deeper.cuh": "#pragma once\nconstexpr int unused = 1;\n",
    "spilling.cu": SPILLING,
    "broken.cu": '#warning "first"\nextern "C" __global__ void broken(int* data) {\n    data[0] = undefined_name;\n}\n',
}


class Arguments(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("count", ctypes.c_int)]


def scale(**constants):
    return specialise("scale.cu", "scale", **{"FACTOR": 3, "FIXED": 32, **constants})


def forget():
    """As a new process."""
    for memory in (compiler._binaries, compiler._compiling, compiler._kernels):
        memory.clear()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Sources of our own, and an empty cache, whose folder is given."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for name, text in SOURCES.items():
        (kernels / name).write_text(text)
    monkeypatch.setattr(compiler, "KERNELS", kernels)
    monkeypatch.setenv("GSANET_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, in order; nothing is really compiled."""
    calls = []

    def fake(specialisation, architecture):
        calls.append((specialisation, architecture))
        return Binary(b"image\n\x00 of " + architecture.encode(), 8, 0, 0, 0, 0, f"log {len(calls)}\n")

    monkeypatch.setattr(compiler, "compile_binary", fake)
    monkeypatch.setattr(compiler, "_nvrtc", lambda: types.SimpleNamespace(nvrtcVersion=lambda: (0, 13, 2)))
    return calls


def test_a_specialisation_is_a_value():
    one = specialise("scale.cu", "scale", FIXED=32, FACTOR=3, FLAG=True)
    assert one == specialise("scale.cu", "scale", FLAG=1, FACTOR=3, FIXED=32)
    assert len({one, scale(), scale()}) == 2
    assert str(one) == "scale of scale.cu (FACTOR=3, FIXED=32, FLAG=1)"


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_compiles(architecture):
    binary = compile_binary(scale(), architecture)
    assert compile_binary(scale(), architecture).registers == binary.registers  # again, as NVRTC has a cache of its own
    assert binary.image.startswith(b"\x7fELF")
    assert 4 <= binary.registers <= 64
    assert (binary.spill_stores, binary.spill_loads, binary.stack) == (0, 0, 0)
    assert binary.shared == 32 * 4
    assert architecture in binary.log


@needs_nvrtc
def test_spills_are_those_of_the_entry():
    spilling, light = (compile_binary(specialise("spilling.cu", name), "sm_90") for name in ("spilling", "light"))
    assert spilling.registers == 32
    assert min(spilling.spill_stores, spilling.spill_loads, spilling.stack) > 100
    assert light.registers < 32
    assert (light.spill_stores, light.spill_loads, light.stack) == (0, 0, 0)


@needs_nvrtc
@pytest.mark.parametrize(("version", "uncached"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_does_not_answer_from_its_own_cache(monkeypatch, version, uncached):
    nvrtc = compiler._nvrtc()
    seen = []

    def compile_program(program, count, options):
        seen.extend(options)
        return nvrtc.nvrtcCompileProgram(program, count, options)

    changed = {"nvrtcVersion": lambda: (0, *version), "nvrtcCompileProgram": compile_program}
    monkeypatch.setattr(compiler, "_nvrtc", lambda: types.SimpleNamespace(**{**vars(nvrtc), **changed}))
    compile_binary(scale(), "sm_90")
    assert (b"--no-cache" in seen) == uncached


@needs_nvrtc
def test_constants_reach_the_source():
    wide = compile_binary(scale(FIXED=100), "sm_80")
    assert wide.shared == 400
    assert compile_binary(scale(FIXED=100, FACTOR="(1.5f + 1)"), "sm_80").image != wide.image
    with pytest.raises(RuntimeError, match="FIXED"):
        compile_binary(specialise("scale.cu", "scale", FACTOR=3), "sm_80")


@needs_nvrtc
def test_an_error_shows_its_first_lines():
    with pytest.raises(RuntimeError) as raised:
        compile_binary(specialise("broken.cu", "broken", WIDTH=7), "sm_90")
    first, *more = str(raised.value).splitlines()
    assert first.startswith("broken of broken.cu (WIDTH=7) does not compile for sm_90: broken.cu(3): error:")
    assert "undefined_name" in first
    assert len(more) < 8


@needs_nvrtc
def test_what_is_missing_is_named(folder):
    with pytest.raises(RuntimeError, match=r'reports no absent: it must be an extern "C" __global__'):
        compile_binary(specialise("spilling.cu", "absent"), "sm_80")
    with pytest.raises(RuntimeError, match="sm_3"):
        compile_binary(scale(), "sm_3")
    with pytest.raises(FileNotFoundError, match=r"absent\.cu"):
        compile_binary(specialise("absent.cu", "absent"), "sm_80")
    (compiler.KERNELS / "deeper.cuh").unlink()
    with pytest.raises(RuntimeError, match=r'types\.cuh\(2\).* "deeper\.cuh"'):
        compile_binary(scale(), "sm_80")


@needs_nvrtc
def test_from_disk_as_compiled(folder, monkeypatch):
    binary = cached_binary(scale(), "sm_90")
    forget()
    monkeypatch.setattr(compiler, "compile_binary", None)
    assert cached_binary(scale(), "sm_90") == binary
    assert len(list(folder.iterdir())) == 1


@needs_nvrtc
def test_several_at_once(folder):
    wanted = [scale(FACTOR=factor) for factor in range(4)]
    binaries = compile_all([*wanted, *wanted], "sm_90", workers=2)
    assert list(binaries) == wanted
    assert len({binary.image for binary in binaries.values()}) == 4
    assert len(list(folder.iterdir())) == 4
    assert compile_all(wanted, "sm_90") == binaries


def test_a_hit_does_not_compile(compiled, folder):
    first = cached_binary(scale(), "sm_90")
    assert cached_binary(scale(), "sm_90") is first
    forget()
    assert cached_binary(scale(), "sm_90") == first
    assert compiled == [(scale(), "sm_90")]


def test_threads_wait_for_one_compilation(compiled):
    threads = [threading.Thread(target=cached_binary, args=(scale(), "sm_90")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


@pytest.mark.parametrize("name", ["scale.cu", "types.cuh", "deeper.cuh"])
def test_a_changed_text_is_compiled_again(compiled, name):
    cached_binary(scale(), "sm_90")
    with (compiler.KERNELS / name).open("a") as file:
        file.write("// changed\n")
    forget()
    cached_binary(scale(), "sm_90")
    assert len(compiled) == 2


def test_what_makes_another_binary(compiled, monkeypatch, folder):
    cached_binary(scale(), "sm_90")
    cached_binary(scale(), "sm_80")
    cached_binary(scale(FACTOR=4), "sm_90")
    forget()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: types.SimpleNamespace(nvrtcVersion=lambda: (0, 13, 3)))
    cached_binary(scale(), "sm_90")
    assert len(compiled) == len(list(folder.iterdir())) == 4


def test_an_unrelated_header_changes_nothing(compiled):
    cached_binary(scale(), "sm_90")
    (compiler.KERNELS / "other.cuh").write_text("// new\n")
    forget()
    cached_binary(scale(), "sm_90")
    assert len(compiled) == 1


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "one bit", "a folder"])
def test_a_damaged_file_is_replaced(compiled, folder, damage):
    binary = cached_binary(scale(), "sm_90")
    (path,) = folder.iterdir()
    good = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = good[:80] + bytes([good[80] ^ 1]) + good[81:]
        damaged = {"empty": b"", "truncated": good[:-3], "garbage": os.urandom(500), "one bit": flipped}
        path.write_bytes(damaged[damage])
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = cached_binary(scale(), "sm_90")
    assert (again.image, len(compiled)) == (binary.image, 2)
    assert list(folder.iterdir()) == [path]
    if damage != "a folder":
        forget()
        assert cached_binary(scale(), "sm_90") == again
        assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_to(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GSANET_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="GSANET_CACHE"):
        cached_binary(scale(), "sm_90")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        cached_binary(scale(), "sm_80")
    assert cached_binary(scale(), "sm_90") is cached_binary(scale(), "sm_90")
    assert len(compiled) == 2


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("GSANET_CACHE", "")
    assert cache.cache_folder() == Path("/xdg/gsanet/kernels")
    monkeypatch.delenv("GSANET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.cache_folder() == Path("/home/someone/.cache/gsanet/kernels")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert cache.read_entry("key") is None
    monkeypatch.setattr(cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="there is no home folder"):
        cache.write_entry("key", {}, b"image")


# Forked before they load the compiler, so that the package is imported once.
FOUR_PROCESSES = """
import multiprocessing, sys
from pathlib import Path
from gsanet.functional.fused import compiler

def compile_one():
    start.wait()
    wanted = compiler.specialise("scale.cu", "scale", FACTOR=3, FIXED=32)
    assert compiler.cached_binary(wanted, "sm_90").registers > 0

compiler.KERNELS = Path(sys.argv[1])
context = multiprocessing.get_context("fork")
start = context.Barrier(4)
processes = [context.Process(target=compile_one) for _ in range(4)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(sum(process.exitcode != 0 for process in processes))
"""


@needs_nvrtc
def test_four_processes_start_at_once(folder):
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", FOUR_PROCESSES, str(compiler.KERNELS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    assert cache.read_entry(path.stem) is not None


def test_nothing_but_json_is_read_back(compiled, folder):
    cached_binary(scale(), "sm_90")
    (path,) = folder.iterdir()
    checksum, header, image = path.read_bytes().split(b"\n", 2)
    assert len(checksum) == 64
    assert json.loads(header) == {
        "registers": 8,
        "spill_stores": 0,
        "spill_loads": 0,
        "stack": 0,
        "shared": 0,
        "log": "log 1\n",
    }
    assert image == b"image\n\x00 of sm_90"


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 1), "sm_120")],
)
def test_architecture(capability, chosen):
    assert choose_architecture(capability, [75, 80, 86, 89, 90, 100, 120]) == chosen


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "8.0 or more.* 7.5"), ((13, 0), "13.0: update torch")])
def test_architectures_refused(capability, reason):
    with pytest.raises(RuntimeError, match=reason):
        choose_architecture(capability, [75, 80, 90, 100, 120])


@pytest.fixture
def _asked_anew():
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_unavailable_without_the_bindings(monkeypatch):
    for name in ("cuda.bindings", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    assert unavailable().startswith("the package cuda-bindings is not installed")


@pytest.mark.usefixtures("_asked_anew")
def test_unavailable_without_nvrtc(monkeypatch):
    def version():
        raise RuntimeError("libnvrtc.so.13 was not found\nsearched in:")

    monkeypatch.setattr(compiler, "_nvrtc", lambda: types.SimpleNamespace(nvrtcVersion=version))
    assert unavailable() == "NVRTC cannot be loaded: libnvrtc.so.13 was not found"


@pytest.mark.usefixtures("_asked_anew")
def test_unavailable_on_an_old_gpu(monkeypatch):
    nvrtc = types.SimpleNamespace(nvrtcVersion=lambda: (0, 13, 2), nvrtcGetSupportedArchs=lambda: (0, [80, 90]))
    monkeypatch.setattr(compiler, "_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert unavailable() is None
    assert "8.0 or more" in unavailable(torch.device("cuda", 90))


RESULTS = {
    "cuDeviceGet": ("device",),
    "cuDevicePrimaryCtxRetain": ("context",),
    "cuModuleLoadData": ("module",),
    "cuModuleGetFunction": ("function",),
    "cuFuncGetParamInfo": (0, ctypes.sizeof(Arguments)),
    "cuCtxPopCurrent": ("context",),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (3,),
    "cuGetErrorName": (b"CUDA_ERROR_INVALID_VALUE",),
    "cuGetErrorString": (b"invalid argument",),
}


class FakeAttribute(types.SimpleNamespace):
    """An attribute of a launch."""

    def __init__(self):
        super().__init__(id=None, value=types.SimpleNamespace())


class FakeDriver:
    """Writes down the calls, with the bytes that the kernel would get; `failures` are the next results by name."""

    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="optin",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
    )
    CUfunction_attribute = types.SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic",
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout",
    )
    CUlaunchAttribute, CUlaunchConfig, CUstream = FakeAttribute, types.SimpleNamespace, int
    CUlaunchAttributeID = types.SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early")

    def __init__(self, capability=8):
        self.calls = []
        self.failures = {}
        self.numbers = {"optin": 232448, "major": capability}

    def __getattr__(self, name):
        def call(*arguments):
            results = RESULTS.get(name, ())
            if name == "cuDeviceGetAttribute":
                results = (self.numbers[arguments[0]],)
            if name in ("cuLaunchKernel", "cuLaunchKernelEx"):
                *arguments, parameters, _ = arguments
                address = ctypes.c_void_p.from_address(parameters).value
                arguments.append(ctypes.string_at(address, ctypes.sizeof(Arguments)))
            self.calls.append((name, *arguments))
            failures = self.failures.get(name)
            return (failures.pop(0) if failures else 0, *results)

        return call

    def names(self):
        return [name for name, *_ in self.calls]


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def kernel(driver):
    kernel = Kernel(scale(), Binary(b"image", 8, 0, 0, 0, 1024, ""), 1, driver)
    yield kernel
    pushed, popped = (driver.names().count(name) for name in ("cuCtxPushCurrent", "cuCtxPopCurrent"))
    assert pushed == popped


def test_loading(kernel, driver):
    assert ("cuDeviceGet", 1) in driver.calls
    assert ("cuModuleLoadData", b"image") in driver.calls
    assert ("cuModuleGetFunction", "module", b"scale") in driver.calls
    assert ("cuFuncSetAttribute", "function", "dynamic", 232448 - 1024) in driver.calls
    assert ("cuFuncSetAttribute", "function", "carveout", 100) in driver.calls


def test_loading_a_kernel_that_needs_cache(driver):
    Kernel(scale(), Binary(b"image", 8, 0, 0, 0, 0, ""), 0, driver, carveout=30)
    assert ("cuFuncSetAttribute", "function", "carveout", 30) in driver.calls


def test_launching(kernel, driver):
    driver.calls.clear()
    arguments = Arguments(0x7F00DEADBEEF, 5)
    kernel.launch(7, 256, 100_000, arguments, 0x1234)
    kernel.launch((2, 3, 4), 128, 0, bytes(Arguments(1, 2)), 0)
    arguments.count = 6
    kernel.launch(7, 256, 100_000, arguments, 0x1234)
    expected = [
        ("cuLaunchKernel", "function", 7, 1, 1, 256, 1, 1, 100_000, 0x1234, bytes(Arguments(0x7F00DEADBEEF, 5))),
        ("cuLaunchKernel", "function", 2, 3, 4, 128, 1, 1, 0, 0, bytes(Arguments(1, 2))),
        ("cuLaunchKernel", "function", 7, 1, 1, 256, 1, 1, 100_000, 0x1234, bytes(Arguments(0x7F00DEADBEEF, 6))),
    ]
    assert driver.calls == expected


@pytest.mark.parametrize("arguments", [b"short", (ctypes.c_int * 9)(), Arguments])
def test_a_struct_of_another_size_is_refused(kernel, driver, arguments):
    class Longer(Arguments):
        _fields_ = [("more", ctypes.c_int64)]

    driver.calls.clear()
    kernel.launch(1, 32, 0, Arguments(), 0)
    with pytest.raises(ValueError, match=r"scale of scale\.cu .* takes a struct of 16 bytes, got"):
        kernel.launch(1, 32, 0, Longer() if arguments is Arguments else arguments, 0)
    assert driver.names() == ["cuLaunchKernel"]


def test_a_launch_without_a_context_makes_one_current(kernel, driver):
    driver.calls.clear()
    driver.failures["cuLaunchKernel"] = [201]
    kernel.launch(1, 32, 0, Arguments(), 0)
    assert driver.names() == ["cuLaunchKernel", "cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]
    assert driver.calls[1][1] == "context"


def test_a_failed_launch_says_what_failed(kernel, driver):
    driver.failures["cuLaunchKernel"] = [1, 1]
    with pytest.raises(RuntimeError) as raised:
        kernel.launch((2, 1, 1), 2048, 64, Arguments(), 0)
    assert str(raised.value) == (
        "scale of scale.cu (FACTOR=3, FIXED=32): cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE: invalid argument "
        "(grid 2 x 1 x 1, 2048 threads, 64 bytes of shared memory)"
    )


@pytest.mark.parametrize(
    "name", ["cuDeviceGetAttribute", *(name for name in RESULTS if "Error" not in name and "Occup" not in name)]
)
def test_a_failed_load_says_what_failed(driver, name):
    driver.failures[name] = [1]
    with pytest.raises(RuntimeError, match=rf"^scale of scale\.cu .*: {name} failed with CUDA_ERROR_INVALID_VALUE"):
        Kernel(scale(), Binary(b"image", 8, 0, 0, 0, 0, ""), 0, driver)


@pytest.fixture
def early_driver(monkeypatch):
    """Of a GPU that launches kernels early."""
    monkeypatch.setattr(dependent, "wanted", True)
    monkeypatch.setattr(dependent, "_refused", False)
    return FakeDriver(capability=9)


@pytest.fixture
def early_kernel(early_driver):
    kernel = Kernel(scale(), Binary(b"image", 8, 0, 0, 0, 0, ""), 0, early_driver)
    early_driver.calls.clear()
    return kernel


def test_launching_early(early_kernel, early_driver):
    first, second = Arguments(0x7F00DEADBEEF, 5), Arguments(1, 2)
    early_kernel.launch(7, 256, 100_000, first, 0x1234)
    early_kernel.launch((2, 3, 4), 128, 0, bytes(second), 0)
    early_kernel.launch(7, 256, 100_000, second, 0x1234)
    early_kernel.launch(7, 256, 100_000, second, 0x5678)
    assert early_driver.names() == ["cuLaunchKernelEx"] * 4
    made = [configuration for _, configuration, _, _ in early_driver.calls]
    assert [call[2:] for call in early_driver.calls] == [
        ("function", bytes(values)) for values in (first, second, second, second)
    ]
    assert made[0] is made[2]
    shapes = [(7, 1, 1, 256, 100_000, 0x1234), (2, 3, 4, 128, 0, 0), (7, 1, 1, 256, 100_000, 0x5678)]
    for one, (x, y, z, threads, shared_bytes, stream) in zip((made[0], made[1], made[3]), shapes, strict=True):
        assert (one.gridDimX, one.gridDimY, one.gridDimZ) == (x, y, z)
        assert (one.blockDimX, one.blockDimY, one.blockDimZ) == (threads, 1, 1)
        assert (one.sharedMemBytes, one.hStream, one.numAttrs) == (shared_bytes, stream, 1)
        (attribute,) = one.attrs
        assert attribute.id == "early"
        assert attribute.value.programmaticStreamSerializationAllowed == 1


@pytest.mark.parametrize(("capability", "early"), [(8, False), (9, True), (12, True)])
def test_what_launches_early(early_driver, capability, early):
    early_driver.numbers["major"] = capability
    kernel = Kernel(scale(), Binary(b"image", 8, 0, 0, 0, 0, ""), 0, early_driver)
    kernel.launch(1, 32, 0, Arguments(), 0)
    assert early_driver.names()[-1] == ("cuLaunchKernelEx" if early else "cuLaunchKernel")


def test_early_launches_can_be_turned_off(early_kernel, early_driver):
    for on in (False, True):
        with dependent.dependent_launches(on):
            early_kernel.launch(1, 32, 0, Arguments(), 0)
    early_kernel.launch(1, 32, 0, Arguments(), 0)
    assert early_driver.names() == ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernelEx"]


def test_an_early_launch_without_a_context_makes_one_current(early_kernel, early_driver):
    early_driver.failures["cuLaunchKernelEx"] = [201]
    early_kernel.launch(1, 32, 0, Arguments(), 0)
    early_kernel.launch(1, 32, 0, Arguments(), 0)
    around = ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    assert early_driver.names() == ["cuLaunchKernelEx", *around, "cuLaunchKernelEx"]


def test_a_driver_that_refuses_early_launches_is_not_asked_again(early_kernel, early_driver):
    early_driver.failures["cuLaunchKernelEx"] = [801, 801]
    early_kernel.launch(1, 32, 0, Arguments(3, 4), 0)
    around = ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuLaunchKernel", "cuCtxPopCurrent"]
    assert early_driver.names() == ["cuLaunchKernelEx", *around]
    assert early_driver.calls[3][-1] == bytes(Arguments(3, 4))
    early_driver.calls.clear()
    early_kernel.launch(1, 32, 0, Arguments(), 0)
    with dependent.dependent_launches(True):
        early_kernel.launch(1, 32, 0, Arguments(), 0)
    Kernel(scale(), Binary(b"image", 8, 0, 0, 0, 0, ""), 0, early_driver).launch(1, 32, 0, Arguments(), 0)
    assert early_driver.names().count("cuLaunchKernel") == 3
    assert "cuLaunchKernelEx" not in early_driver.names()


def test_refused_while_they_are_asked_for(early_kernel, early_driver):
    early_driver.failures["cuLaunchKernelEx"] = [801, 801]
    with dependent.dependent_launches(True):
        early_kernel.launch(1, 32, 0, Arguments(), 0)
    early_kernel.launch(1, 32, 0, Arguments(), 0)
    assert early_driver.names().count("cuLaunchKernelEx") == 2


def test_a_launch_that_fails_in_any_way_refuses_nothing(early_kernel, early_driver):
    early_driver.failures |= {"cuLaunchKernelEx": [1, 1], "cuLaunchKernel": [1]}
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE: .* 2048 threads"):
        early_kernel.launch(1, 2048, 0, Arguments(), 0)
    assert early_driver.names().count("cuCtxPopCurrent") == 1
    early_kernel.launch(1, 32, 0, Arguments(), 0)
    assert early_driver.names()[-1] == "cuLaunchKernelEx"


def test_configurations_are_not_kept_without_end(early_driver):
    configurations = dependent.Configurations(early_driver)
    first = configurations[1, 1, 1, 32, 0, 0]
    for stream in range(dependent.MOST_SHAPES - 1):
        configurations[1, 1, 1, 32, 0, stream]
    assert configurations[1, 1, 1, 32, 0, 0] is first
    for stream in range(dependent.MOST_SHAPES + 1):
        assert configurations[1, 1, 1, 32, 0, stream].hStream == stream
    assert len(configurations) < dependent.MOST_SHAPES


@needs_nvrtc
def test_a_configuration_of_the_real_bindings():
    bindings = compiler._driver()
    made = dependent.Configurations(bindings)[5, 2, 1, 256, 4096, 0x1234]
    assert (made.gridDimX, made.gridDimY, made.gridDimZ, made.blockDimX) == (5, 2, 1, 256)
    assert (made.sharedMemBytes, int(made.hStream), made.numAttrs) == (4096, 0x1234, 1)
    (attribute,) = made.attrs
    names = bindings.CUlaunchAttributeID
    assert attribute.id == names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_occupancy_is_asked_once(kernel, driver):
    driver.calls.clear()
    assert [kernel.max_blocks_per_multiprocessor(256, 4096) for _ in range(3)] == [3, 3, 3]
    assert driver.names().count("cuOccupancyMaxActiveBlocksPerMultiprocessor") == 1
    assert driver.calls[1][1:] == ("function", 256, 4096)


def test_kernels_are_loaded_once_for_each_device(compiled, driver, monkeypatch):
    monkeypatch.setattr(compiler, "_driver", lambda: driver)
    monkeypatch.setattr(compiler, "architecture_of", lambda device: f"sm_{80 + 10 * device.index}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    loaded = []
    threads = [
        threading.Thread(target=lambda index=index: loaded.append(load_kernel(scale(), torch.device("cuda", index))))
        for index in (0, 1, 0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(loaded)) == 2
    assert driver.names().count("cuModuleLoadData") == 2
    assert load_kernel(scale(), torch.device("cuda")) is load_kernel(scale(), torch.device("cuda", 1))
    assert sorted(architecture for _, architecture in compiled) == ["sm_80", "sm_90"]


def run_scale(kernel, data, blocks=4, threads=256, shared_bytes=1024):
    stream = torch.cuda.current_stream(data.device).cuda_stream
    kernel.launch(blocks, threads, shared_bytes, Arguments(data.data_ptr(), data.numel()), stream)


@needs_gpu
def test_on_a_gpu():
    data = torch.arange(1000.0, device="cuda")
    kernel = load_kernel(scale(), data.device)
    run_scale(kernel, data)
    assert torch.equal(data, 3 * torch.arange(1000.0, device="cuda"))
    run_scale(kernel, data, shared_bytes=200_000 if torch.cuda.get_device_capability() == (9, 0) else 90_000)
    assert torch.equal(data, 9 * torch.arange(1000.0, device="cuda"))
    assert kernel.max_blocks_per_multiprocessor(256, 1024) > kernel.max_blocks_per_multiprocessor(256, 90_000) >= 1
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        run_scale(kernel, data, threads=5000)


@needs_gpu
def test_captured_in_a_graph():
    data = torch.ones(1000, device="cuda")
    kernel = load_kernel(scale(), data.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_scale(kernel, data)
    assert data.sum() == 1000
    graph.replay()
    graph.replay()
    assert data.sum() == 9000


@needs_gpu
def test_launched_from_a_thread_that_has_not_used_the_gpu():
    data = torch.ones(1000, device="cuda")
    kernel = load_kernel(scale(), data.device)
    torch.cuda.synchronize()
    thread = threading.Thread(target=kernel.launch, args=(4, 256, 1024, Arguments(data.data_ptr(), 1000), 0))
    thread.start()
    thread.join()
    assert data.sum() == 3000
