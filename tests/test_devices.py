"""Where commands compute, and the memory of a CPU."""

import ctypes
import subprocess
import sys

import pytest

from gsanet import devices

FAULTS = """
import resource, sys, torch
from gsanet.devices import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for number in range(30):
    if number == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that ten tensors of 64 MiB, one after the other, get from the system, behind twenty others."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"), reason="no mallopt here"
)
def test_freed_memory_is_kept():
    kept = faults("keep")
    assert kept < 1000
    assert kept < faults("as usual")


@pytest.mark.parametrize("error", [OSError, TypeError])
def test_other_libraries_do_as_they_do(monkeypatch, error):
    def refuse(name):
        raise error

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    devices.keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    devices.keep_freed_memory()


def test_devices():
    devices.check_device(devices.default_device())
    with pytest.raises(ValueError, match="cpu or cuda, got 'tpu'"):
        devices.check_device("tpu")
