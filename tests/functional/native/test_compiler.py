"""From source to a loaded library: which compiler, what is kept, and what happens where it cannot be done."""

import os
import platform
import shutil
import stat
import sys

import pytest
import torch
from helpers import gradients, maps, relative_error, table

from gsanet import GlobalSelfAttention
from gsanet.functional import content_attention, explain_backend, positional_attention, use_backend
from gsanet.functional.native import compiler

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler among those tried"
)
# As small as the kernels' source may be: its entries do nothing.
SOURCE = "\n".join(f'extern "C" void {name}() {{}}' for name in compiler.ENTRIES)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """Nothing is built or loaded yet, and the cache is empty."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "source.cpp").write_text(SOURCE)
    monkeypatch.setattr(compiler, "KERNELS", tmp_path / "kernels")
    monkeypatch.setenv("GSANET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    compiler._outcome.cache_clear()
    yield
    compiler._outcome.cache_clear()


@pytest.fixture
def commands(monkeypatch):
    """The commands that were run."""
    seen = []
    run = compiler._run

    def note(command):
        seen.append(command)
        return run(command)

    monkeypatch.setattr(compiler, "_run", note)
    return seen


def compilations(commands):
    return [command for command in commands if "-shared" in command]


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def explain():
    return explain_backend("content_attention", *maps((1, 16, 16, 2), 8, 8, torch.float32))


def test_without_a_compiler_the_backend_torch_does_the_work(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert explain().endswith("native refuses: no C++ compiler is found, neither CXX nor c++, g++, clang++")
    inputs = maps((1, 16, 16, 2), 8, 8, torch.float32)
    with use_backend("torch"):
        expected = content_attention(*inputs)
    assert torch.equal(content_attention(*inputs), expected)
    with pytest.raises(compiler.UnavailableError, match="no C\\+\\+ compiler"):
        compiler.library()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "CXX names the C++ compiler '{name}', which is not found"),
        ("echo broken.h:1: fatal error: out of luck >&2; exit 1", "the C++ compiler '{name}' fails: broken.h:1: fatal"),
        ("exit 3", "the C++ compiler '{name}' fails: status 3"),
        ('for last; do :; done; echo "no library" > "$last" || true', "the compiled kernels cannot be loaded"),
    ],
)
def test_a_compiler_that_fails(text, words, monkeypatch, tmp_path):
    name = str(tmp_path / "compiler") if text is None else script(tmp_path / "compiler", text)
    monkeypatch.setenv("CXX", name)
    said = explain()
    assert said.startswith("torch: ")
    assert words.format(name=name) in said
    assert "\n" not in said


@needs_compiler
def test_kept_and_found_again(commands, tmp_path):
    assert compiler.unavailable() is None
    assert len(compilations(commands)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
    compiler._outcome.cache_clear()
    assert compiler.unavailable() is None
    assert len(compilations(commands)) == 1


@needs_compiler
def test_a_broken_file_is_built_again(commands, tmp_path):
    compiler.unavailable()
    (file,) = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    compiler._outcome.cache_clear()
    assert compiler.unavailable() is None
    assert len(compilations(commands)) == 2
    assert len(file.read_bytes()) > len(content) // 2


@needs_compiler
def test_another_source_or_machine_is_another_library(commands, monkeypatch, tmp_path):
    compiler.unavailable()
    (tmp_path / "kernels" / "source.cpp").write_text(f"{SOURCE}\n// changed")
    compiler._outcome.cache_clear()
    compiler.unavailable()
    monkeypatch.setattr(compiler, "MACHINES", ((),))
    compiler._outcome.cache_clear()
    compiler.unavailable()
    assert len(compilations(commands)) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3


@needs_compiler
def test_cxx_may_have_options(commands, monkeypatch):
    name = next(filter(shutil.which, compiler.COMPILERS))
    monkeypatch.setenv("CXX", f"{name} -DFIRST=1")
    assert compiler.unavailable() is None
    assert all(command[:2] == [name, "-DFIRST=1"] for command in commands)


@needs_compiler
@pytest.mark.parametrize("known", ["-march=native", "-mcpu=native", "neither"])
def test_a_compiler_that_has_another_name_for_this_machine(known, commands, monkeypatch, tmp_path):
    """Or none: it builds for the least machine of the kind."""
    name = next(filter(shutil.which, compiler.COMPILERS))
    text = f"""
        for one; do
            shift
            case $one in
                {known}) ;;
                -m*=native) echo "error: unsupported option '$one'" >&2; exit 1 ;;
                *) set -- "$@" "$one" ;;
            esac
        done
        exec {name} "$@"
    """
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    assert compiler.unavailable() is None
    (command,) = compilations(commands)
    assert [flag for flag in command if flag.endswith("native")] == ([] if known == "neither" else [known])


def test_without_openmp_the_backend_torch_does_the_work(monkeypatch):
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda file: object())
    with pytest.raises(compiler.UnavailableError, match="not those of an OpenMP"):
        compiler._parallel()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no list of threads")
@pytest.mark.parametrize("name", compiler.COMPILERS[1:])
def test_the_threads_are_those_of_pytorch(name, monkeypatch):
    """A second set of threads would be in the way of the first."""
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}")
    monkeypatch.undo()
    monkeypatch.setenv("CXX", name)
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.randn(1_000_000).relu_()
        before = os.listdir("/proc/self/task")
        assert explain().startswith("native")
        content_attention(*maps((1, 16, 16, 2), 8, 8, torch.float32))
        assert set(os.listdir("/proc/self/task")) <= set(before)
    finally:
        torch.set_num_threads(count)


def agrees_with_torch(shape, heads, key, value):
    """Whether the kernels that are built now give what the backend `torch` gives, gradients as well."""
    q, k, v = (one.requires_grad_() for one in maps((2, *shape, heads), key, value, torch.float32))
    rel = table(shape[0], key, torch.float32, grad=True)
    x, module = torch.randn(2, 24, *shape), GlobalSelfAttention(24, feat_size=shape).eval()

    def run():
        with torch.no_grad():
            content, whole = content_attention(q, k, v), module(x)
        out = positional_attention(q, v, rel, "column")
        return content, whole, out, *gradients(out, (q, v, rel))

    found = run()
    with use_backend("torch"):
        return all(relative_error(one, expected) < 2e-6 for one, expected in zip(found, run(), strict=True))


@needs_compiler
def test_kernels_for_the_least_machine_of_a_kind(monkeypatch):
    """With vectors of another size than on most, and without warnings."""
    monkeypatch.undo()
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")  # how vectors are passed on between files: none is
    monkeypatch.setattr(compiler, "FLAGS", ("-std=c++17", "-O1", "-fPIC", *warnings))
    monkeypatch.setattr(compiler, "MACHINES", ((),))
    compiler._outcome.cache_clear()
    assert explain().startswith("native")
    assert agrees_with_torch((19, 16), heads=3, key=9, value=8)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have other names")
@pytest.mark.parametrize(
    ("machine", "capabilities"),
    [
        ("x86-64", ("DEFAULT", "AVX2", "AVX512")),
        ("haswell", ("AVX2", "AVX512")),
        ("skylake-avx512", ("AVX512",)),
    ],
)
def test_kernels_for_other_machines_than_this(machine, capabilities, monkeypatch):
    """A compiler vectorises for each machine in another way. With heads and lines that do not fill the vectors."""
    if torch.backends.cpu.get_cpu_capability() not in capabilities:
        pytest.skip(f"the CPU cannot run what is compiled for {machine}")
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "MACHINES", ((f"-march={machine}",),))
    compiler._outcome.cache_clear()
    assert compiler.unavailable() is None
    assert agrees_with_torch((9, 13), heads=4, key=9, value=9)
