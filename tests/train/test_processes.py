"""Several processes over gloo: the same command under torchrun."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from gsanet.train import checkpoint
from gsanet.train.engine import train

# Batch statistics are those of a process, so they are frozen here: SyncBN needs GPUs.
OPTIONS = {"freeze_bn": True, "steps": 60, "lr": 0.02, "checkpoint_steps": 5, "timeout_minutes": 1}


def torchrun(*arguments):
    """Start `gsanet train` in two processes, in a directory and environment like a user's."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    command = [*launcher, "-m", "gsanet", "train", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output = process.communicate(timeout=180)[0]
    return process.returncode, output


@pytest.fixture
def recipe_file(tiny_recipe, tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(tiny_recipe(**OPTIONS).to_yaml())
    return file


def test_two_processes_train_as_one_and_survive_the_death_of_one(tiny_recipe, recipe_file, tmp_path):
    train(tiny_recipe(**OPTIONS), tmp_path / "one")
    code, output = finish(torchrun("--recipe", recipe_file, "--out", tmp_path / "two"))
    assert code == 0, output
    assert "2 processes x 1 part x 32" in output
    assert output.count("Done: 60 steps") == 1  # one of them speaks
    one, two = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, expected in one.items():
        assert (two[name] - expected).float().norm() <= 1e-4 * expected.float().norm(), name
    found = [checkpoint.load(tmp_path / name / "last")[0].state["evaluation"] for name in ("one", "two")]
    assert found[0]["images"] == found[1]["images"] == 360
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-3)

    # The same again, but one process is killed on the way.
    run = tmp_path / "killed"
    process = torchrun("--recipe", recipe_file, "--out", run)
    deadline = time.monotonic() + 120
    while not (run / "last.previous").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks = {child.environ().get("RANK"): child for child in psutil.Process(process.pid).children()}
    ranks["1"].kill()
    began = time.monotonic()
    code, output = finish(process)
    assert code != 0
    assert time.monotonic() - began < 60
    reached = checkpoint.load(run / "last")[0].state["step"]
    assert 0 < reached < 60
    code, output = finish(torchrun("--resume", run))
    assert code == 0, output
    assert f"step {reached} of 60" in output
    resumed = load_file(run / "last" / "model.safetensors")
    for name in two:
        assert torch.equal(two[name], resumed[name]), name


def test_an_error_in_the_first_process_ends_all(recipe_file, tmp_path):
    (tmp_path / "file").write_text("")
    began = time.monotonic()
    code, output = finish(torchrun("--recipe", recipe_file, "--out", tmp_path / "file" / "run"))
    assert code != 0
    assert "cannot write the run directory" in output
    assert time.monotonic() - began < 90
