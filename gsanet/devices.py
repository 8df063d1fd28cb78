"""Where the commands compute: what `--device` may say, and what it is if nothing is said."""

import torch

__all__ = ["check_device", "default_device"]


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """Refuse what is neither the CPU nor a GPU, and a GPU that is not there."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but there is no GPU here")
