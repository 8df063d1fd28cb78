"""Whether a process is writing to a run directory, so that no second one starts there."""

import os
from io import FileIO
from pathlib import Path

if os.name == "posix":
    import fcntl


def hold(file: FileIO) -> None:
    """Mark an open file as in use until it is closed, or its process ends in whatever way."""
    _lock(file)  # where it cannot be had, the file is written all the same


def is_held(path: Path) -> bool:
    """Whether another process, or another part of this one, holds a file; false where the system cannot tell."""
    if not path.exists():
        return False
    with path.open("rb", buffering=0) as file:
        return not _lock(file)


def _lock(file: FileIO) -> bool:
    """Take the lock of a file; false if another has it."""
    if os.name == "posix":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
    return True
