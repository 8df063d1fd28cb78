"""The stand-in that the kernels are tested with: each intrinsic, and what it is to find."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from functional.fused.host import COMPILER, HOST, KERNELS, fenced, launch

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")

CHECKS = HOST / "checks"
ORDERS = ("forward", "reverse", "random:1")
LANE = np.arange(32)


def run(source, entry, grid, threads, shared_bytes, *values, order="forward"):
    """Launch with a structure made of the values: pointers to tensors, and integers."""
    kinds = [ctypes.c_void_p if isinstance(value, torch.Tensor) else ctypes.c_int for value in values]
    fields = [(f"field_{i}", kind) for i, kind in enumerate(kinds)]
    arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})(
        *(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)
    )
    launch(source, entry, {}, grid, threads, shared_bytes, arguments, order, CHECKS)


def random_floats(count, generator):
    """Floats of any bit pattern, and many near the limits of 16-bit scalars."""
    bits = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator, dtype=torch.int64).to(torch.int32)
    exponents = torch.randint(-30, 18, (count - count // 2,), generator=generator)
    fractions = 1 + torch.randint(0, 2**12, exponents.shape, generator=generator) / 2**12  # ties among them
    edges = [0.0, -0.0, 65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 3.4028235e38, float("inf"), float("nan")]
    return torch.cat([bits.view(torch.float32), torch.ldexp(fractions, exponents), torch.tensor(edges)])


def same_bits(one, other):
    """Whether values are the same, signs of zeros too; any NaN is like any other."""
    number = ~one.isnan()
    same = torch.equal(number, ~other.isnan()) and torch.equal(one[number], other[number])
    return same and torch.equal(one[number].signbit(), other[number].signbit())


@pytest.mark.parametrize("order", ORDERS)
def test_load_matrices(order):
    matrices = np.random.default_rng(0).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    words = torch.zeros(32, 14, dtype=torch.int32)
    run("intrinsics.cu", "matrices", 1, 32, 512, torch.from_numpy(matrices), words, order=order)
    expected = []
    for transposed in (False, True):
        for count in (1, 2, 4):
            for matrix in matrices[:count]:
                stored = matrix.T if transposed else matrix
                row, column = LANE // 4, LANE % 4 * 2
                expected.append(stored[row, column] | stored[row, column + 1].astype(np.uint32) << 16)
    assert np.array_equal(words.numpy().view(np.uint32), np.stack(expected, 1))


@pytest.mark.parametrize("order", ORDERS)
def test_shuffle(order):
    generator = np.random.default_rng(2)
    words, lanes = (generator.integers(0, most, 32, dtype=np.int32) for most in (2**31 - 1, 32))
    shuffled = torch.zeros(32, dtype=torch.int32)
    run("intrinsics.cu", "shuffles", 1, 32, 0, torch.from_numpy(words), torch.from_numpy(lanes), shuffled, order=order)
    assert np.array_equal(shuffled.numpy(), words[lanes])


@pytest.mark.parametrize("order", ORDERS)
def test_turn_matrix(order):
    matrix = np.random.default_rng(1).integers(0, 2**16, (8, 8)).astype(np.uint16)
    turned = torch.zeros(32, dtype=torch.int32)
    run("intrinsics.cu", "turns", 1, 32, 0, torch.from_numpy(matrix), turned, order=order)
    assert np.array_equal(turned.numpy().view(np.uint16).reshape(8, 8), matrix.T)


def fragments(depth, is_float):
    """Which element of the matrices each lane holds: rows and columns of the left, right and output matrix.

    As the PTX manual says it for mma.m16n8k8 and mma.m16n8k16: by group (lane / 4) and thread in the group.
    """
    group, thread = LANE[:, None] // 4, LANE[:, None] % 4
    i = np.arange(4)[None]
    output = group + 8 * (i >= 2), thread * 2 + i % 2
    if is_float:
        left = group + 8 * (i % 2), thread + 4 * (i >= 2)
        right = thread + 4 * i[:, :2], group + 0 * i[:, :2]
    elif depth == 8:
        left = group + 8 * (i >= 2), thread * 2 + i % 2
        right = thread * 2 + i[:, :2], group + 0 * i[:, :2]
    else:
        eight = np.arange(8)[None]
        left = group + 8 * (eight // 2 % 2), thread * 2 + eight % 2 + 8 * (eight >= 4)
        right = thread * 2 + i % 2 + 8 * (i >= 2), group + 0 * i
    return left, right, output


@pytest.mark.parametrize(
    ("kind", "dtype", "depth"),
    [
        (0, torch.bfloat16, 8),
        (1, torch.bfloat16, 16),
        (2, torch.float16, 8),
        (3, torch.float16, 16),
        (4, torch.float32, 8),
    ],
)
def test_multiply_add(kind, dtype, depth):
    generator = torch.Generator().manual_seed(kind)
    left = torch.randn(16, depth, generator=generator).to(dtype)
    right = torch.randn(depth, 8, generator=generator).to(dtype)
    start = torch.randn(16, 8, generator=generator)
    of_left, of_right, of_output = fragments(depth, dtype == torch.float32)
    words = [torch.zeros(32, 4, dtype=torch.int32), torch.zeros(32, 2, dtype=torch.int32)]
    for to, matrix, where in zip(words, (left, right), (of_left, of_right), strict=True):
        held = matrix[where].contiguous().view(torch.int32)
        to[:, : held.shape[1]] = held
    sums = start[of_output].contiguous()
    run("intrinsics.cu", "products", 1, 32, 0, *words, sums, kind)
    if dtype == torch.float32:  # the last 13 bits do not count
        left, right = ((matrix.view(torch.int32) & ~0x1FFF).view(torch.float32) for matrix in (left, right))
    expected = start.double() + left.double() @ right.double()
    torch.testing.assert_close(sums, expected[of_output].float(), rtol=3e-7, atol=1e-7)


def test_scalars():
    values = random_floats(100_000, torch.Generator().manual_seed(0))
    count = len(values)
    bf16_words, f16_words = torch.zeros(2, count, dtype=torch.int32)
    tf32, exponentials, roots, maxima, products = torch.zeros(5, count)
    from_bf16, from_f16 = torch.zeros(2, 65536)
    outputs = bf16_words, f16_words, tf32, exponentials, roots, maxima, products, from_bf16, from_f16
    run("intrinsics.cu", "scalars", 3, 256, 0, values, *outputs, count)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for words, floats, dtype in (
        (bf16_words, from_bf16, torch.bfloat16),
        (f16_words, from_f16, torch.float16),
    ):
        assert same_bits(floats, patterns.view(dtype).float())
        low, high = words.view(dtype).view(count, 2).unbind(1)
        assert same_bits(low, values.to(dtype))
        assert same_bits(high, (-values).to(dtype))
    # Ties away from zero: the nearest of 10 bits of the fraction, from the size plus half a last place.
    finite = values.isfinite() & (values.abs() < 3.4e38) & (values.abs() > 2.0**-126)
    fraction, exponent = np.frexp(values[finite].double().numpy())
    nearest = np.ldexp(np.copysign(np.floor(np.abs(fraction) * 2**11 + 0.5), fraction), exponent - 11)
    assert np.array_equal(tf32[finite].double().numpy(), nearest)
    assert torch.equal(tf32[values.isinf()], values[values.isinf()])
    sizes = values.abs() < 80
    torch.testing.assert_close(exponentials[sizes], values[sizes].exp(), rtol=1e-5, atol=0.0)
    assert exponentials[values < -90].eq(0).all()
    assert exponentials[values > 90].isposinf().all()
    assert same_bits(maxima, torch.maximum(values, values.flip(0)))
    exact = values.double() * values.flip(0).double() + 1  # but for products that are far larger or smaller than 1
    near = exact.isfinite() & (exact.abs() < 2.0**20) & ((exact - 1).abs() > 2.0**-20)
    assert near.sum() > 1000
    torch.testing.assert_close(products[near], exact[near].float(), rtol=1.2e-7, atol=0.0)
    with np.errstate(invalid="ignore"):
        assert same_bits(roots, torch.from_numpy(np.sqrt(values.numpy())))  # torch's own is not always the nearest


@pytest.mark.parametrize("order", ORDERS)
def test_block_reduction(order):
    values = torch.randint(-9, 9, (2, 3, 256), generator=torch.Generator().manual_seed(0)).float()
    sums, shuffled = torch.zeros(2, 3), torch.zeros(2, 3, 256)
    run("intrinsics.cu", "reduction", (3, 2), 256, 1024, fenced(values), sums, shuffled, 200, order=order)
    values[..., 200:] = 0
    assert torch.equal(sums, values.sum(-1))
    threads = torch.arange(256)
    assert torch.equal(shuffled, values[..., threads ^ (1 + threads // 32)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        ("bf16_8", torch.bfloat16),
        ("bf16_16", torch.bfloat16),
        ("f16_8", torch.float16),
        ("f16_16", torch.float16),
        ("float_8", torch.float32),
    ],
)
def test_fragments(entry, dtype, order):
    generator = torch.Generator().manual_seed(0)
    length = 2 * int(entry.split("_")[1])
    left, right = torch.randn(2, 16, length, generator=generator).to(dtype).unbind(0)
    sums, reloaded = torch.zeros(2, 12, 16, 16)
    rounded = torch.zeros(12, 16, 16, dtype=dtype)
    access = 16 // dtype.itemsize
    shared_bytes = dtype.itemsize * (2 * (16 * (length + access) + length * (16 + access)) + 16 * length)
    tensors = fenced(left), fenced(right), sums, rounded, reloaded
    run("fragments.cu", entry, 1, 32, shared_bytes, *tensors, order=order)
    expected = (left.double() @ right.double().T).expand_as(sums)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=4e-6)
    assert torch.equal(rounded, sums.to(dtype))
    assert torch.equal(reloaded, rounded.float())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [("bf16_rows", torch.bfloat16), ("f16_rows", torch.float16), ("float_rows", torch.float32)],
)
def test_rows_of_products_are_stored(entry, dtype, order):
    tiles, stride = 7, 72
    sums = torch.randn(16, 8 * tiles, generator=torch.Generator().manual_seed(0))
    stored = torch.full((tiles, 2, 2, 16, stride), 5.0, dtype=dtype)  # rows, then the way
    run("fragments.cu", entry, 1, 32, 16 * stride * dtype.itemsize, fenced(sums), stored, order=order)
    expected = torch.zeros_like(stored)
    for count in range(1, tiles + 1):
        expected[count - 1, 0, :, :, : 8 * count] = sums[:, : 8 * count].to(dtype)
        expected[count - 1, 1, :, :8, : 8 * count] = sums[:8, : 8 * count].to(dtype)
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (1, "warp . diverged: .* (warp_barrier|shuffle_xor) at mistakes.cu:"),
        (2, "warp . diverged: .* shuffle_xor at mistakes.cu:.* shuffle_xor at mistakes.cu"),
        (3, "warp 1 waits at block_barrier at mistakes.cu:.*, but warp 0 has finished"),
        (4, "warp 0 diverged: .* (lane 5 is at the end of the kernel|block_barrier)"),
        (5, "warp 0 diverged: .* (lane 5 is at the end of the kernel|shuffle_xor)"),
        (6, "byte 64 was written, outside of the block's 64 bytes"),
        (7, "byte -1 was written, outside of the block's 64 bytes"),
        (8, "load_matrices: byte 8 of shared memory is not a multiple of 16"),
        (9, "load_matrices: byte .* is outside of the block's 64 bytes"),
        (10, "copy_async: byte 8 of shared memory is not a multiple of 16"),
        (11, "copy_async: byte 64 is outside of the block's 64 bytes"),
        (12, "copy_async: address .* is not a multiple of 16"),
        (13, "the kernel ends before wait_for_copies"),
        (14, "mistakes.cu:.*: address .* is not aligned"),
        (15, "access to address .*, where there is no memory"),
        (16, "mistakes.cu:.*: index 4 is outside of the array"),
        (17, "division by zero"),
        (18, "warp . waits at block_barrier at mistakes.cu:.*, but warp . at block_barrier"),
        (19, "access to address .*, where there is no memory"),
        (20, "take_turn is called 32 times by 64 threads"),
        (21, "bring_near: 8 bytes at address .* are not in pieces of 16"),
        (22, "access to address .*, where there is no memory"),
        (23, "assume_threads: 32 threads where there are 64"),
        (24, "store_matrices: byte 8 of shared memory is not a multiple of 16"),
        (25, "copy_async: byte 4 of shared memory is not a multiple of 8"),
        (26, "copy_async: byte 64 is outside of the block's 64 bytes"),
        (27, "copy_async: address .* is not a multiple of 8"),
    ],
)
def test_errors(how, message, order):
    values = fenced(torch.zeros(64))
    with pytest.raises(RuntimeError, match=message):
        run("mistakes.cu", "errors", 1, 64, 64, values, how, order=order)
    # The next launch is not hurt by it.
    run("mistakes.cu", "errors", 1, 64, 64, values, 0, order=order)
    assert values.eq(1).all()


def races(how, order):
    values = torch.arange(128.0)
    run("mistakes.cu", "races", 1, 64, 1024, values, how, order=order)
    return values[:64]


MANY_ORDERS = ("forward", "reverse", *(f"random:{seed}" for seed in range(20)))


def test_no_race():
    right = races(0, "forward")
    assert right.isfinite().all()
    assert all(torch.equal(races(0, order), right) for order in MANY_ORDERS)


@pytest.mark.parametrize("how", [*range(1, 8), 9])
def test_races_in_shared_memory(how):
    """Any one order is enough, even where no value depends on it."""
    place = "the beginning" if how == 1 else r"(block|warp)_barrier at mistakes\.cu:\d+"
    message = rf"a race: byte \d+ of shared memory is (read|written) after {place}, and was (read|written) by "
    for order in MANY_ORDERS:
        with pytest.raises(RuntimeError, match=message):
            races(how, order)


def test_races_in_global_memory():
    """Another order gives other values."""
    right = races(0, "forward")
    assert any(not torch.equal(races(8, order), right) for order in ("forward", "reverse"))
    assert any(not torch.equal(races(8, f"random:{seed}"), right) for seed in range(20))


def test_what_does_not_start():
    values = torch.zeros(64)
    with pytest.raises(RuntimeError, match="arguments have 16 bytes, not 24"):
        run("mistakes.cu", "errors", 1, 64, 64, values, 0, 0, 0)
    with pytest.raises(RuntimeError, match="has no kernel none"):
        run("mistakes.cu", "none", 1, 64, 64, values, 0)
    with pytest.raises(RuntimeError, match="33 threads"):
        run("mistakes.cu", "errors", 1, 33, 64, values, 0)
    with pytest.raises(RuntimeError, match="no device has more"):
        run("mistakes.cu", "errors", 1, 64, 300_000, values, 0)


def test_constants_and_compile_errors(tmp_path: Path):
    class Arguments(ctypes.Structure):
        _fields_ = (("to", ctypes.c_void_p),)

    (tmp_path / "small.cu").write_text(
        "#include <intrinsics.cuh>\n"
        "struct Arguments { float* to; };\n"
        "KERNEL(32, 1) small(Arguments arguments) { arguments.to[thread_index()] = NUMBER + sizeof(SCALAR); }\n"
    )
    to = torch.zeros(32)
    for number, scalar, expected in ((3, "bf16", 5), (3, "float", 7), (4, "float", 8)):
        launch(
            "small.cu",
            "small",
            {"NUMBER": number, "SCALAR": scalar},
            1,
            32,
            0,
            Arguments(to.data_ptr()),
            folder=tmp_path,
        )
        assert to.eq(expected).all()
    with pytest.raises(RuntimeError, match=r"error: .*NUMBER"):
        launch("small.cu", "small", {"SCALAR": "float"}, 1, 32, 0, Arguments(to.data_ptr()), folder=tmp_path)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("source", ["intrinsics.cu", "fragments.cu"])
def test_the_device_compiler_takes_the_same_source(source, architecture):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram((CHECKS / source).read_bytes(), source.encode(), 0, [], [])
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", f"--include-path={KERNELS}"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert not log.strip(b"\0"), log.decode()
