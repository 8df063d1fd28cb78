"""Which state of this repository is running."""

import subprocess
from pathlib import Path


def package_commit() -> str | None:
    """The commit of the package's source, if it runs from a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
