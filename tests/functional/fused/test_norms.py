"""The operators around batch norms against PyTorch's own layers in float64: outputs, gradients and statistics.

As in `test_kernels`, each test runs the kernels' own source on the host stand-in and, where there is one, on a GPU:

    python -m pytest -n 8 -k gpu tests/functional/fused/test_norms.py
"""

import pytest
import torch
import torch.nn.functional as F
from functional.fused.test_kernels import BF16, FLOAT, HALF, TOLERANCE, check_close, normal, same_bits
from torch import nn

from gsanet.functional.fused import calls, norm_ops
from gsanet.functional.fused.plan import Machine

LAST = torch.channels_last


def feature_map(kernels, dtype, *shape, seed=0):
    return normal(*shape, dtype=dtype, seed=seed).to(kernels.device, memory_format=LAST)


def affine(kernels, channels):
    """Weight, bias and centre of a norm; some weights are negative, one is zero."""
    weight = normal(channels, dtype=FLOAT, seed=5)
    weight[channels // 2] = 0.0
    return [one.to(kernels.device) for one in (weight, normal(channels, dtype=FLOAT, seed=6), normal(channels, dtype=FLOAT, seed=7))]


def exact_statistics(x, weight, bias, epsilon):
    x = x.double()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    inverse = (variance + epsilon).rsqrt()
    scale = inverse * (1.0 if weight is None else weight.double())
    shift = (0.0 if bias is None else bias.double()) - mean * scale
    return torch.stack((scale, shift, mean, inverse, variance))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (FLOAT, (2, 64, 9, 7)),
        (BF16, (2, 64, 9, 7)),
        (HALF, (2, 64, 9, 7)),
        (BF16, (3, 8, 31, 29)),  # one group of channels: every thread a row
        (FLOAT, (1, 8, 1, 2)),
        (BF16, (2, 72, 13, 5)),  # threads are left over
        (BF16, (2, 296, 9, 8)),  # slices that are not full
        (FLOAT, (2, 264, 6, 5)),
        (BF16, (1, 520, 3, 3)),
        (BF16, (4, 256, 14, 14)),  # several rounds of a block
    ],
    ids=str,
)
def test_channel_statistics(kernels, dtype, shape):
    x = 3 + feature_map(kernels, dtype, *shape) * 2
    weight, bias, centre = affine(kernels, shape[1])
    with kernels.running():
        found = norm_ops.channel_statistics(x, centre, weight, bias, 1e-3)
        for name, one, other in zip(
            ("scale", "shift", "mean", "inverse", "variance"), found, exact_statistics(x, weight, bias, 1e-3), strict=True
        ):
            check_close(name, one, other, FLOAT)
        assert kernels.entries == {"channel_sums", "norm_statistics"}
        for _ in kernels.other_orders():
            assert torch.equal(norm_ops.channel_statistics(x, centre, weight, bias, 1e-3), found), kernels.order
        without = norm_ops.channel_statistics(x, centre, None, None, 1e-3)
    check_close("without weights", without, exact_statistics(x, None, None, 1e-3), FLOAT)


@pytest.mark.parametrize("kernels", ["host"], indirect=True)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_channel_statistics_on_other_machines(kernels, multiprocessors):
    kernels.machine = Machine(multiprocessors, 227 * 1024, 228 * 1024)
    x = feature_map(kernels, BF16, 5, 64, 20, 21)
    with kernels.running():
        found = norm_ops.channel_statistics(x, torch.zeros(64), None, None, 1e-5)
    check_close("statistics", found, exact_statistics(x, None, None, 1e-5), FLOAT)


def test_statistics_of_a_mean_far_from_zero(kernels):
    x = (1000 + normal(4, 16, 9, 9)).float().to(kernels.device)
    with kernels.running():
        found = norm_ops.channel_statistics(x, torch.full((16,), 1000.0, device=x.device), None, None, 0.0)
    check_close("variance", found[4], exact_statistics(x, None, None, 0.0)[4], FLOAT)


def plain_pool(x, weight, bias, epsilon=1e-5):
    out = F.batch_norm(x, None, None, weight, bias, True, 0.0, epsilon)
    return F.max_pool2d(out.relu(), 3, 2, 1)


def norm_pool(x, weight, bias, centre, epsilon=1e-5):
    return norm_ops.norm_relu_max_pool(x, centre, weight, bias, epsilon)[0]


def gradients(function, x, weight, bias, d_out):
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in (x, weight, bias)]
    out = function(*leaves)
    wanted = [one for one in leaves if one is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, d_out.to(out.dtype))]


def check_pool(kernels, dtype, shape, *, with_norm=True, x=None, d_out=None):
    batch, channels, height, width = shape
    x = feature_map(kernels, dtype, *shape) if x is None else x
    weight, bias, centre = affine(kernels, channels)
    if not with_norm:
        weight = bias = None
    if d_out is None:
        d_out = feature_map(kernels, dtype, batch, channels, -(-height // 2), -(-width // 2), seed=3)
    exact = [None if one is None else one.double() for one in (x, weight, bias)]
    expected = gradients(plain_pool, *exact, d_out.double())
    with kernels.running():
        found = gradients(lambda *leaves: norm_pool(*leaves, centre), x, weight, bias, d_out)
        assert kernels.entries == {
            "channel_sums", "norm_statistics", "norm_pool", "norm_pool_sums", "norm_gradient", "norm_pool_gradient",
        }  # fmt: skip
        assert found[0].dtype == found[1].dtype == dtype
        assert all(one.is_contiguous(memory_format=LAST) for one in found[:2])
        names = ("output", "gradient of x", "gradient of the weight", "gradient of the bias")
        for name, one, other in zip(names[: len(found)], found, expected, strict=True):
            check_close(name, one, other, dtype)
        for _ in kernels.other_orders():
            again = gradients(lambda *leaves: norm_pool(*leaves, centre), x, weight, bias, d_out)
            assert same_bits(again, found), f"{kernels.order} order differs"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (FLOAT, (2, 64, 12, 10)),
        (BF16, (2, 64, 12, 10)),
        (HALF, (2, 64, 12, 10)),
        (FLOAT, (2, 16, 9, 7)),
        (BF16, (2, 16, 7, 8)),
        (BF16, (2, 8, 8, 9)),
        (FLOAT, (3, 8, 1, 5)),
        (BF16, (3, 24, 5, 1)),
        (FLOAT, (3, 8, 2, 2)),
        (FLOAT, (5, 40, 1, 1)),
        (BF16, (1, 72, 40, 33)),
    ],
    ids=str,
)
def test_norm_relu_max_pool(kernels, dtype, shape):
    check_pool(kernels, dtype, shape)


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_norm_relu_max_pool_without_weights(kernels, dtype):
    check_pool(kernels, dtype, (2, 16, 9, 10), with_norm=False)
