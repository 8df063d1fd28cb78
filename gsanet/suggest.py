"""The end of an error message about a name that does not exist."""

import difflib
from collections.abc import Iterable


def suggest(word: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or all of them where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
