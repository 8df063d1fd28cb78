"""Where the commands compute: what `--device` may say, what it is if nothing is said, and memory of a CPU."""

import ctypes

import torch

__all__ = ["check_device", "default_device", "keep_freed_memory"]

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # as mallopt names them


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """Refuse what is neither the CPU nor a GPU, and a GPU that is not there."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but there is no GPU here")


def keep_freed_memory() -> None:
    """Have the C library keep the memory that tensors leave, for the next ones, where it has a way to say so (glibc).

    By default it gives large pieces back to the system, and gets them again page by page, each full of zeros: half the
    time of an evaluation on a CPU. It is for whole processes, so commands call it, and the library itself does not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_TRIM_THRESHOLD, -1)  # never
    mallopt(M_MMAP_MAX, 0)
