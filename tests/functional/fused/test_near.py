"""Kernels of lines that have their next lines come to the cache while they work: nothing else is different."""

import copy
from dataclasses import replace

import pytest
import torch
from functional.fused.test_kernels import BF16, FLOAT, make_module, normal, same_bits, step

from gsanet.functional.fused.plan import lines, plan_line

CASES = [
    (BF16, (2, 64, 12, 18), {"stride": 2}),
    (FLOAT, (2, 32, 9, 10), {"num_heads": 2}),
    (BF16, (3, 64, 8, 6), {}),  # bundles
    (BF16, (2, 24, 10, 12), {"num_heads": 2, "row": False}),  # heads that are moved one number at a time
]


@pytest.fixture(autouse=True)
def plans_of_each_test():
    plan_line.cache_clear()
    yield
    plan_line.cache_clear()


@pytest.mark.parametrize(("dtype", "shape", "options"), CASES, ids=str)
def test_the_same_bits(kernels, monkeypatch, dtype, shape, options):
    _, channels, *size = shape
    if kernels.device == "cpu":
        kernels.machine = replace(kernels.machine, multiprocessors=1)  # so that a block has several lines
    module = make_module(dtype, channels, tuple(size), **options).to(kernels.device).train()
    x = normal(*shape, dtype=dtype).to(kernels.device, memory_format=torch.channels_last)
    with torch.no_grad(), kernels.running(poison=False):
        d_out = normal(*copy.deepcopy(module)(x).shape, dtype=dtype, seed=1).to(kernels.device)
    results = []
    for blocks in (0, 9):
        monkeypatch.setattr(lines, "NEAR_BLOCKS", dict.fromkeys(lines.NEAR_BLOCKS, blocks))
        plan_line.cache_clear()
        kernels.launched.clear()
        with kernels.running():
            results.append(step(copy.deepcopy(module), x, d_out))
        found = [one for entry in lines.NEAR_BLOCKS for one in kernels.constants(entry)]
        assert found
        assert all(one["NEAR"] == (one["VECTOR"] and blocks > 0) for one in found)
    assert same_bits(*(one.values() for one in results))
