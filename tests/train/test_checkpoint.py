import errno
import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch

from gsanet.train import checkpoint
from gsanet.train.checkpoint import CheckpointError


def tensors(value):
    return {"model": {"a": torch.full((3, 4), float(value)), "n": torch.tensor(value)}}


def value_of(found):
    return int(found.tensors["model"]["n"])


def test_what_is_saved_is_loaded(tmp_path):
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    saved = {"model": {"w": weight, "half": weight.bfloat16()}, "optimizer": {}}
    checkpoint.save(tmp_path / "last", saved, {"step": 3, "loss": 0.1})
    found, damage = checkpoint.load(tmp_path / "last")
    assert found.state == {"step": 3, "loss": 0.1}
    assert damage == []
    assert torch.equal(found.tensors["model"]["w"], weight)
    assert torch.equal(found.tensors["model"]["half"], weight.bfloat16())
    assert found.tensors["optimizer"] == {}


def test_nothing_was_ever_saved(tmp_path):
    assert checkpoint.load(tmp_path / "last") == (None, [])


def damage_truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    return "model.safetensors is damaged: it has"


def damage_flipped(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return "model.safetensors is damaged: its SHA-256"


def damage_missing(folder):
    (folder / "model.safetensors").unlink()
    return "model.safetensors is damaged: it has 0 bytes"


def damage_manifest(folder):
    file = folder / "checkpoint.json"
    file.write_text(file.read_text()[:-20])
    return "checkpoint.json is damaged"


@pytest.mark.parametrize("damage", [damage_truncated, damage_flipped, damage_missing, damage_manifest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damage, tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path / "last", tensors(step), {"step": step})
    message = damage(tmp_path / "last")
    found, lines = checkpoint.load(tmp_path / "last")
    assert (found.state, value_of(found)) == ({"step": 1}, 1)
    assert message in lines[0]
    damage(tmp_path / "last.previous")
    with pytest.raises(CheckpointError, match="no whole checkpoint is left"):
        checkpoint.load(tmp_path / "last")


def test_a_crash_at_any_moment_of_writing_leaves_a_whole_checkpoint(tmp_path):
    """A process that is killed at its n-th call into the operating system, for every n."""
    path = tmp_path / "last"
    checkpoint.save(path, tensors(1), {"step": 1})
    checkpoint.save(path, tensors(2), {"step": 2})
    calls = ["open", "os.rename", "os.mkdir", "os.fsync", "os.rmdir", "os.remove", "shutil.rmtree"]
    outcomes = []
    for count in range(1, 100):
        child = os.fork()
        if child == 0:
            left = [count]

            def hook(event, arguments, left=left):
                if event in calls:
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            checkpoint.save(path, tensors(3), {"step": 3})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found, damage = checkpoint.load(path)
        assert damage == []
        assert value_of(found) == found.state["step"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        outcomes.append(found.state["step"])
        # Back to where it began, so that each moment is met once.
        checkpoint.save(path, tensors(1), {"step": 1})
        checkpoint.save(path, tensors(2), {"step": 2})
    assert len(outcomes) > 8
    assert set(outcomes) == {2, 3}
    assert found.state["step"] == 3


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.json"])
def test_a_disk_that_does_not_take_it_leaves_the_old_one(reason, name, tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "last", tensors(1), {"step": 1})
    write = checkpoint.write_durably

    def fail(file, content):
        if file.name == name:
            write(file, content[: len(content) // 2])
            raise OSError(reason, os.strerror(reason))
        write(file, content)

    monkeypatch.setattr(checkpoint, "write_durably", fail)
    with pytest.raises(CheckpointError, match=f"{os.strerror(reason)}.*last is unharmed.*--resume"):
        checkpoint.save(tmp_path / "last", tensors(2), {"step": 2})
    assert value_of(checkpoint.load(tmp_path / "last")[0]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]  # half a checkpoint takes no space


def test_a_real_limit_on_file_size(tmp_path):
    """What the operating system says, not a stand-in for it."""
    checkpoint.save(tmp_path / "last", tensors(1), {"step": 1})
    script = """
import resource, signal, sys, torch
from pathlib import Path
from gsanet.train import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
checkpoint.save(Path(sys.argv[1]), {"model": {"a": torch.zeros(100_000)}}, {"step": 2})
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "last")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "File too large" in done.stderr.splitlines()[-1]
    assert value_of(checkpoint.load(tmp_path / "last")[0]) == 1


def test_a_strangers_checkpoint_cannot_run_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    checkpoint.save(tmp_path / "last", tensors(1), {"step": 1})
    content = pickle.dumps(Bomb())
    (tmp_path / "last" / "model.safetensors").write_bytes(content)
    manifest = json.loads((tmp_path / "last" / "checkpoint.json").read_text())
    import hashlib

    manifest["files"]["model.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "last" / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not safetensors"):
        checkpoint.load(tmp_path / "last")
    assert not (tmp_path / "exploded").exists()


def test_files_outside_the_checkpoint_are_not_read(tmp_path):
    checkpoint.save(tmp_path / "last", tensors(1), {"step": 1})
    manifest = json.loads((tmp_path / "last" / "checkpoint.json").read_text())
    manifest["files"]["../secret.safetensors"] = manifest["files"].pop("model.safetensors")
    (tmp_path / "last" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (tmp_path / "last" / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "last")
