"""Compiled kernels on disk: one file for each, which many processes may read and write at once.

A file is a checksum, a header in JSON, and the image. What is truncated, garbled or unreadable counts as absent, and
a folder that cannot be written to costs a warning and the time to compile.
"""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

_warned = False


def cache_folder() -> Path:
    """The folder of the files: `GSANET_CACHE`, or `gsanet/kernels` in the user's cache folder."""
    if chosen := os.environ.get("GSANET_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # a user without a home, as some containers have: not a folder named ~ where they stand
        raise FileNotFoundError(errno.ENOENT, "there is no home folder")
    return Path(base, "gsanet", "kernels")


def read_entry(key: str) -> tuple[dict[str, Any], bytes] | None:
    """The header and the image stored under a key, or None."""
    try:
        content = _path(key).read_bytes()
    except OSError:
        return None
    checksum, _, body = content.partition(b"\n")
    if checksum != _checksum(body):
        return None
    header, _, image = body.partition(b"\n")
    return json.loads(header), image


def write_entry(key: str, header: dict[str, Any], image: bytes) -> None:
    """Store a header and an image under a key; they appear at once and whole, or not at all."""
    body = json.dumps(header).encode() + b"\n" + image
    temporary = None
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{key[:16]}-", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(_checksum(body) + b"\n" + body)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _warn_once(str(error))


def _path(key: str) -> Path:
    return cache_folder() / f"{key}.bin"


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled kernels cannot be kept ({reason}), so that each process compiles them anew: "
            "set GSANET_CACHE to a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )
