r"""Typeset the LaTeX of the pages as MathML, which browsers draw themselves, without a script or a font of ours.

`pymdownx.arithmatex` finds the formulas, as GitHub does, and leaves them as LaTeX between `\(` and `\)` or `\[` and
`\]`. This Markdown extension takes them from there.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


class MathML(Postprocessor):
    """Replaces the formulas of a finished page."""

    def run(self, text: str) -> str:
        """A page with LaTeX to a page with MathML."""
        return FORMULA.sub(self.typeset, text)

    @staticmethod
    def typeset(found: re.Match[str]) -> str:
        """One formula: in the line, or on its own."""
        tag, latex = found[1], html.unescape(found[2])
        formula = convert(latex.strip(), display="block" if tag == "div" else "inline")
        return f'<{tag} class="formula">{formula}</{tag}>'


class MathMLExtension(Extension):
    """Registers `MathML` behind everything else."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        """Called by Markdown."""
        md.postprocessors.register(MathML(md), "mathml", -100)


def makeExtension(**options: Any) -> MathMLExtension:  # noqa: N802
    """Called by Markdown with what mkdocs.yml says."""
    return MathMLExtension(**options)
