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


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A folder of runs as `gsanet demo` leaves it: a GSA network and its twin, small, trained for a few seconds."""
    from gsanet.train.engine import train
    from gsanet.train.recipe import load_recipe

    folder = tmp_path_factory.mktemp("quickstart")
    for name, epochs in (("gsa_resnet26_tiny", 5), ("conv_resnet26_tiny", 1)):
        options = {"model": name, "epochs": epochs, "model_kwargs.width": 0.25}
        train(load_recipe("quickstart", options), folder / name)
    return folder


@pytest.fixture(scope="session")
def digit(tmp_path_factory):
    """One of scikit-learn's scans, a three, as an image file."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    file = tmp_path_factory.mktemp("digit") / "three.png"
    Image.fromarray(np.rint(load_digits().images[3] * (255 / 16)).astype(np.uint8)).save(file)
    return file


@pytest.fixture
def gsanet(monkeypatch, capsys):
    """Run the command in this process; its exit code, and what it printed and complained."""
    from gsanet.cli import main

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["gsanet", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


@pytest.fixture
def command(gsanet):
    """The same with the exit code checked: what it printed, or complained where it failed."""

    def run(*arguments, code=0):
        left, out, complaint = gsanet(*arguments)
        assert left == code, complaint
        return out if code == 0 else complaint

    return run
