import os
import sys

# Two workers share two cores; more threads than that only get in each other's way. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Reproducible, and no time limits for one example: the machines that run this are shared.
settings.register_profile(
    "gsanet", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("gsanet")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["reference", "torch"])
def backend(request):
    from gsanet.functional import use_backend

    with use_backend(request.param):
        yield request.param


@pytest.fixture
def command(monkeypatch, capsys):
    """The command, in this process: importing torch anew takes longer than what is tested."""
    from gsanet.cli import main

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["gsanet", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        assert left.value.code == code, printed.err
        return printed.out if code == 0 else printed.err

    return run
