"""Kernels of lines that have their next lines come to the cache while they work: nothing else is different."""

import copy
from dataclasses import replace

import pytest
import torch
from functional.fused.test_kernels import BF16, make_module, normal, same_bits, step

from gsanet.functional.fused.plan import lines, plan_line


@pytest.fixture(autouse=True)
def plans_of_each_test():
    plan_line.cache_clear()
    yield
    plan_line.cache_clear()


def test_the_same_bits(kernels, monkeypatch):
    if kernels.device == "cpu":
        kernels.machine = replace(kernels.machine, multiprocessors=1)  # so that a block has several lines
    module = make_module(BF16, 32, (12, 18), stride=2, num_heads=2, dim_key=16).to(kernels.device).train()
    x = normal(2, 32, 12, 18, dtype=BF16).to(kernels.device, memory_format=torch.channels_last)
    with torch.no_grad(), kernels.running(poison=False):
        d_out = normal(*copy.deepcopy(module)(x).shape, dtype=BF16, seed=1).to(kernels.device)
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
