"""Checkpoints that survive a crash and cannot run code.

A checkpoint is a directory: tensors as safetensors, the rest as JSON, and in `checkpoint.json` the size and SHA-256 of
each file. Nothing is ever unpickled. It is written beside the old one, flushed to the disk, and then takes its place;
the old one stays as `NAME.previous`. So at any moment at least one of the two is whole, and `load` finds it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

MANIFEST = "checkpoint.json"


class CheckpointError(OSError):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved.

    Args:
        tensors: For each name, such as `model`, the tensors by name.
        state: Everything that is not a tensor.
        path: Where it was read from.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


def save(path: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write a checkpoint in the place of the one at `path`.

    Raises:
        CheckpointError: The disk is full or cannot be written; what was there before is unharmed.
    """
    new, previous = path.with_name(f"{path.name}.new"), _previous(path)
    kept = next((good for good in (path, previous) if good.exists()), None)
    advice = f"; {kept} is unharmed{go_on(path.parent)}" if kept else ""
    shutil.rmtree(new, ignore_errors=True)  # what a crash has left
    with explained(f"the checkpoint {path}", advice), _removed_on_failure(new):
        new.mkdir(parents=True)
        files = {}
        for name, group in tensors.items():
            content = safetensors.torch.save({key: tensor.detach().cpu().contiguous() for key, tensor in group.items()})
            write_durably(new / f"{name}.safetensors", content)
            files[f"{name}.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        # Last: a directory with a manifest is complete.
        write_durably(new / MANIFEST, json.dumps({"state": dict(state), "files": files}, indent=2).encode())
        sync_directory(new)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        new.rename(path)
        sync_directory(path.parent)


def load(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Read the checkpoint at `path`, or the one before it if that one is damaged.

    Returns:
        The checkpoint, None if none was ever written; and a line on each damaged one that was passed over.

    Raises:
        CheckpointError: There are checkpoints, but all are damaged.
    """
    damage: list[str] = []
    for candidate in (path, _previous(path)):
        if candidate.exists():
            try:
                return read(candidate), damage
            except CheckpointError as error:
                damage.append(str(error))
    if damage:
        raise CheckpointError(f"no whole checkpoint is left: {'; '.join(damage)}")
    return None, []


def exists(path: Path) -> bool:
    """Whether there is a checkpoint at `path`, damaged or not."""
    return any((candidate / MANIFEST).exists() for candidate in (path, _previous(path)))


def holds_steps(path: Path) -> bool:
    """Whether something was trained in what is at `path`: true of all but a whole manifest that says no step was done.

    The checkpoint that `path` replaced counts too.
    """
    for candidate in (path, _previous(path)):
        if candidate.exists():
            try:
                if json.loads((candidate / MANIFEST).read_text())["state"]["step"] != 0:
                    return True
            except (OSError, ValueError, TypeError, KeyError):
                return True
    return False


def read(path: Path) -> Checkpoint:
    """Read one checkpoint directory and compare it with its checksums."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        state, files = manifest["state"], manifest["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(f"checkpoint file {path / MANIFEST} is damaged: it is not whole JSON") from None
    tensors = {}
    for name, expected in files.items():
        file = path / Path(name).name  # whatever the manifest says, a file of this directory
        content = file.read_bytes() if file.exists() else b""
        if len(content) != expected["bytes"]:
            reason = f"it has {len(content)} bytes instead of {expected['bytes']}"
            raise CheckpointError(f"checkpoint file {file} is damaged: {reason}")
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"checkpoint file {file} is damaged: its SHA-256 is not the one it was written with")
        try:
            tensors[file.stem] = safetensors.torch.load(content)
        except safetensors.SafetensorError:
            raise CheckpointError(f"checkpoint file {file} is damaged: it is not safetensors") from None
    return Checkpoint(tensors, state, path)


@contextmanager
def explained(what: object, advice: str = "") -> Iterator[None]:
    """Say in a sentence what could not be written, and what to do about it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write {what}: {error.strerror or error}{advice}") from error


def go_on(out: Path) -> str:
    """How to continue a run that could not write."""
    return f"; when there is space and permission, go on with `gsanet train --resume {out}`"


def write_durably(file: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(file: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old or the new one."""
    new = file.with_name(f"{file.name}.new")
    write_durably(new, content)
    new.replace(file)


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Half a checkpoint is of no use, and takes space."""
    try:
        yield
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")
