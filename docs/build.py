"""Build the documentation site into `site/`: first the parts made from the package, then the pages around them.

python docs/build.py          # strictly: a broken link, anchor or reference is an error
python docs/build.py serve    # shows the pages in a browser and follows what is edited
"""

import os
import subprocess
import sys
from pathlib import Path

import parts

ROOT = Path(__file__).parents[1]


def write_parts(folder: Path) -> None:
    """One Markdown file for each part; a page takes it in with a line `--8<-- "NAME.md"`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in parts.PARTS.items():
        (folder / f"{name}.md").write_text(make(), encoding="utf-8")


def main() -> None:
    command = {(): ["build", "--strict", "--clean"], ("serve",): ["serve"]}.get(tuple(sys.argv[1:]))
    if command is None:
        sys.exit(f"usage: python docs/build.py [serve], got {' '.join(sys.argv[1:])}")
    os.chdir(ROOT)
    write_parts(Path("build/parts"))
    # The Markdown extension of the formulas lies in this folder.
    path = os.pathsep.join(filter(None, [str(ROOT / "docs"), os.environ.get("PYTHONPATH")]))
    sys.exit(subprocess.call([sys.executable, "-m", "zensical", *command], env={**os.environ, "PYTHONPATH": path}))


if __name__ == "__main__":
    main()
