"""What the commands share: consoles, options, and checks of what was given."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda. Default: the GPU if there is one.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value over the recipe's, such as lr=0.05 or data.padding=2.")
]


def read_overrides(settings: Sequence[str] | None, options: dict[str, str]) -> dict[str, Any]:
    """What the command line says over the recipe: the options that were given, and then --set."""
    from gsanet.train.recipe import parse_overrides

    return {**{key: value for key, value in options.items() if value}, **parse_overrides(settings or [])}


def check_writable(file: Path, picture: bool = False) -> None:
    """Refuse what cannot be written before any work: a folder, a file whose folder is not there or takes no files.

    And a picture whose name does not say its format.
    """
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent} to write {file.name} into")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: give the name of a file")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}") from None
    if picture and not file.suffix:
        raise ValueError(f"the name of a picture says its format, such as {file}.png, got {file}")


def parse_size(text: str) -> tuple[int, int] | None:
    """The (height, width) of 224 or 160x96; None if nothing was given."""
    if not text:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"image size must be like 224 or 160x96, got {text!r}")
    return int(parts[0]), int(parts[-1])


def say(line: str) -> None:
    """A line about progress, away from what is printed for use."""
    errors.print(line, highlight=False, soft_wrap=True, markup=False)


def show(content: Any, parts: Iterable[RenderableType], as_json: bool, *, fold: bool = False) -> None:
    """Print what was found, as JSON or for people.

    Args:
        content: For JSON.
        parts: Tables and lines, for people.
        as_json: Which of both.
        fold: Break lines at the width of the terminal, as tables are.
    """
    if as_json:
        print(json.dumps(content, indent=2))
        return
    print_parts(parts, fold=fold)


def print_parts(parts: Iterable[RenderableType], *, fold: bool = False) -> None:
    """Print tables and lines; `fold` as in `show`."""
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str) and not fold)
