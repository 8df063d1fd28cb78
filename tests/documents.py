"""The pages of the documentation, and the code blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
BLOCK = re.compile(r"^ *```(.*?)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def blocks(page, *languages):
    """The code blocks of a page in one of the languages, in their order."""
    return [text for language, text in BLOCK.findall(PAGES[page].read_text()) if language in languages]


def numbered_blocks(*languages):
    """All code blocks in one of the languages, named by page and number."""
    return {f"{page}-{number}": text for page in PAGES for number, text in enumerate(blocks(page, *languages))}
