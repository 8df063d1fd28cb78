"""What error messages are made of."""

import difflib
from collections.abc import Iterable


def suggest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about a name that does not exist: the nearest known one as a question.

    Args:
        word: The name.
        known: Those that exist.
        otherwise: What to say where none is near. Default: all of them.
    """
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"one of {', '.join(known)}"


def count(number: int, one: str, many: str = "") -> str:
    """As `1 image` and `1,000 images`; `many` where it takes more than an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException) -> str:
    """What an error says first; its class if it says nothing."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
