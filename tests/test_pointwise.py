"""The benchmark of 1x1 convolutions on a CPU, `benchmarks/pointwise.py`."""

import pointwise as benchmark
import pytest
import torch
from torch.testing import assert_close

from gsanet.functional.native import calls, pointwise
from gsanet.functional.native.compiler import unavailable


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_it_compares_both_ways_at_each_shape(capsys, monkeypatch):
    seen = []
    real = calls.convolve_pointwise
    monkeypatch.setattr(calls, "convolve_pointwise", lambda *a, **k: seen.append(a[0].shape) or real(*a, **k))
    limit, threads = pointwise.MOST_PIXELS, torch.get_num_threads()
    benchmark.main(["--threads", "1", "--batches", "1", "--seconds", "0.001", "--shapes", "7", "--img-size", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "threads: 1, batch: 1"
    assert [line.split(",")[0].split()[0] for line in lines[3:]] == ["7x7"] * 3 + ["GSA-ResNet-50"]
    assert all(float(line.split()[-1]) > 0 for line in lines[3:])
    assert (1, 2048, 7, 7) in seen
    assert (pointwise.MOST_PIXELS, torch.get_num_threads()) == (limit, threads)


def test_both_ways_do_the_same():
    for case in benchmark.CONVOLUTIONS[-4:]:
        found = []
        for most in (0, 10**9):
            with benchmark.pixels_at_most(most), torch.no_grad():
                found.append(benchmark.Convolution(case, 1)())
        assert_close(*found, rtol=1e-4, atol=1e-3)
