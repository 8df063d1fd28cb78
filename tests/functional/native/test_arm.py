"""The kernels built for 64-bit ARM and run in an emulator, called from here, against the reference in float64."""

import copy
import ctypes
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functional.native.test_training import assert_close_to_double, make_module
from helpers import gradients, maps, relative_error, table
from torch import Tensor, nn

from gsanet import GlobalSelfAttention
from gsanet.functional import content_attention, native, positional_attention, use_backend
from gsanet.functional.convolution import convolution_relu
from gsanet.functional.native import calls, compiler, pointwise

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = next(filter(shutil.which, ("qemu-aarch64", "qemu-aarch64-static")), None)
WARNINGS = ("-Wall", "-Wextra", "-Werror")
ROUNDING = 2e-6

pytestmark = pytest.mark.skipif(
    EMULATOR is None or shutil.which(COMPILER) is None, reason=f"needs {COMPILER} and qemu-aarch64"
)


class Emulated:
    """A library whose kernels run in an emulator: what they point to goes there, and comes back."""

    def __init__(self, program):
        self.program, self.tensors = program, {}

    def data_ptr(self, tensor):
        """As `Tensor.data_ptr`, which says which tensor a pointer is of."""
        pointer = torch._C.TensorBase.data_ptr(tensor)
        self.tensors[pointer] = tensor
        return pointer

    def __getattr__(self, name):
        return partial(self.call, name)

    def call(self, name, reference):
        arguments = bytes(reference._obj)
        pointers = {place: int.from_bytes(arguments[place:][:8], "little") for place in pointers_of(reference._obj)}
        pointers = {place: pointer for place, pointer in pointers.items() if pointer}
        storages = {place: self.tensors[pointer].untyped_storage() for place, pointer in pointers.items()}
        memories = {storage.data_ptr(): bytes_of(storage) for storage in storages.values()}  # maps may be parts of one
        starts, sent = list(memories), [number(len(memories))]
        for memory in memories.values():
            sent += number(len(memory)), memory.tobytes()
        sent += number(len(arguments)), arguments
        for place, pointer in pointers.items():
            start = storages[place].data_ptr()
            sent += number(place), number(starts.index(start)), number(pointer - start)
        command = [EMULATOR, self.program, name]
        answer = subprocess.run(command, input=b"".join(sent), capture_output=True, check=True).stdout
        assert len(answer) == sum(map(len, memories.values()))
        for memory in memories.values():
            memory[:], answer = answer[: len(memory)], answer[len(memory) :]


def bytes_of(storage):
    """A storage's memory."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def pointers_of(structure):
    """Where its pointers lie, in bytes."""
    for name, kind in structure._fields_:
        place = getattr(type(structure), name).offset
        if kind is ctypes.c_void_p:
            yield place
        elif issubclass(kind, ctypes.Structure):
            yield from (place + inner for inner in pointers_of(getattr(structure, name)))


def number(value):
    return value.to_bytes(8, "little")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("arm") / "program"
    sources = [Path(__file__).with_name("emulated.cpp"), *compiler.KERNELS.glob("*.cpp")]
    flags = (*compiler.FLAGS, *WARNINGS, "-static", "-fopenmp", "-o", file)
    subprocess.run([COMPILER, *sources, *flags], check=True)
    return file


@pytest.fixture(autouse=True)
def _on_arm(program, monkeypatch):
    """The backend's kernels are the emulated ones, and it takes small maps too, with three threads."""
    emulated = Emulated(program)
    monkeypatch.setattr(calls, "library", lambda: emulated)
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: emulated.data_ptr(tensor), raising=False)
    monkeypatch.setattr(native, "_unavailable", lambda: None)
    monkeypatch.setattr(native, "FEW", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    yield
    assert emulated.tensors  # the kernels have been called


SHAPES = [((2, 14, 10, 8), 8, 8), ((1, 9, 13, 3), 9, 9), ((1, 67, 2, 2), 32, 4), ((1, 5, 6, 1), 17, 33)]


@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_content_and_its_gradients(shape, k, v):
    inputs = maps(shape, k, v, torch.float32, grad=True)
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    found = content_attention(*inputs)
    with use_backend("reference"):
        expected = content_attention(*doubles)
    assert relative_error(found, expected) < ROUNDING
    for one, wanted in zip(gradients(found, inputs), gradients(expected, doubles), strict=True):
        assert relative_error(one, wanted) < ROUNDING


@pytest.mark.parametrize("axis", ["column", "row"])
@pytest.mark.parametrize(("shape", "k", "v"), SHAPES)
def test_positional_and_its_gradients(shape, k, v, axis):
    q, _, values = maps(shape, k, v, torch.float32, grad=True)
    inputs = q, values, table(max(shape[1:3]), k, torch.float32, grad=True)
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    found = positional_attention(*inputs, axis)
    with use_backend("reference"):
        expected = positional_attention(*doubles, axis)
    assert relative_error(found, expected) < ROUNDING
    for one, wanted in zip(gradients(found, inputs), gradients(expected, doubles), strict=True):
        assert relative_error(one, wanted) < ROUNDING


@pytest.mark.parametrize(("heads", "dim", "settings"), [
    (8, 64, {}), (4, 36, {"content": False}), (3, 24, {"column": False}), (2, 8, {"column": False, "row": False}),
    (20, 60, {"reach": 2}),
])  # fmt: skip
def test_whole_module(heads, dim, settings):
    module = GlobalSelfAttention(dim, feat_size=(9, 7), num_heads=heads, **settings).eval().requires_grad_(False)
    if module.norm is not None:
        nn.init.normal_(module.norm.weight)
        module.norm.running_var.uniform_(0.5, 2)
    x = torch.randn(5, dim, 9, 7)
    with use_backend("reference"):
        expected = copy.deepcopy(module).double()(x.double())
    assert relative_error(module(x), expected) < ROUNDING


@pytest.mark.parametrize("settings", [{}, {"heads": 3, "dim": 24, "dim_key": 27}, {"content": False}], ids=str)
def test_training(settings):
    module = make_module(9, 7, **settings)
    assert_close_to_double(module, torch.randn(2, module.dim, 9, 7).to(memory_format=torch.channels_last))


@pytest.mark.parametrize(("channels", "outputs", "stride"), [(24, 40, 1), (33, 70, 2)])
def test_pointwise_convolution(channels, outputs, stride, monkeypatch):
    monkeypatch.setattr(pointwise, "FEWEST_WEIGHTS", 1)
    x = torch.randn(2, channels, 5, 7).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(outputs, channels, 1, 1), torch.randn(outputs)
    expected = F.conv2d(x.double(), weight.double(), bias.double(), stride)
    residual = torch.randn(expected.shape).to(memory_format=torch.channels_last)
    found = convolution_relu(x, weight, bias, residual, (stride, stride))
    assert relative_error(found, (expected + residual).relu()) < ROUNDING


def test_bfloat16(monkeypatch):
    module = make_module(9, 7, heads=3, dim=24, dim_key=27).bfloat16()
    x = torch.randn(2, 24, 9, 7).bfloat16()
    assert_close_to_double(module, x, bound=1e-2)
    module.eval().requires_grad_(False)
    with use_backend("reference"):
        expected = copy.deepcopy(module).double()(x.double())
    assert relative_error(module(x), expected) < 1e-2
    monkeypatch.setattr(pointwise, "FEWEST_WEIGHTS", 1)
    weight, bias = torch.randn(37, 24, 1, 1).bfloat16(), torch.randn(37).bfloat16()
    expected = F.conv2d(x.double(), weight.double(), bias.double()).relu()
    assert relative_error(convolution_relu(x, weight, bias), expected) < 1e-2
