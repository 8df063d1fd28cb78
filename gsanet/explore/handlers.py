"""What each click on the page does: from what is looked at to the parts of the page that change."""

from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr

from gsanet.explore import page
from gsanet.explore.study import Choice, Explorer, Subject
from gsanet.images import UnreadableImageError

# What the answers hold, in this order: all that depends on the pixel, and what a new picture changes besides.
LOOK = ("choice", "picture", "stage", "block", "head", "branches", "heads", "stages", "exactness")
PICTURE = ("file", "subject", "prediction", *LOOK)
MESSAGE_SECONDS = 15


class Handlers:
    """The answers to clicks and uploads; of each session, Gradio keeps the subject and the choice.

    What a browser sends is not trusted: a number that is none, or out of range, changes nothing.

    Args:
        explorer: The network.
    """

    def __init__(self, explorer: Explorer):
        self.explorer = explorer

    def open_first(self) -> list[Any]:
        """The page as one finds it."""
        return self._start(self.explorer.open_sample(next(iter(self.explorer.samples))))

    def open_sample(self, event: gr.EventData) -> list[Any]:
        """One of the samples was clicked."""
        name = str(_sent(event).get("sample", ""))
        return self._start(self.explorer.open_sample(name)) if name in self.explorer.samples else _same(PICTURE)

    def open_file(self, file: str | None) -> list[Any]:
        """A file was dropped; one that gives no picture is named, and the page stays as it was."""
        if file is None:
            return _same(PICTURE)
        try:
            return self._start(self.explorer.open_file(file))
        except UnreadableImageError as error:
            _tell(f"{error}.")
            return [None, *_same(PICTURE[1:])]

    def pick_pixel(self, subject: Subject | None, choice: Choice | None, event: gr.EventData) -> list[Any]:
        """The picture was clicked."""
        sent = _sent(event)
        return self._look(subject, choice, at=(_number(sent, "x"), _number(sent, "y")))

    def pick_branch(self, subject: Subject | None, choice: Choice | None, event: gr.EventData) -> list[Any]:
        """The map of a branch was clicked."""
        return self._look(subject, choice, branch=str(_sent(event).get("branch", "")))

    def pick_head(self, subject: Subject | None, choice: Choice | None, event: gr.EventData) -> list[Any]:
        """The map of a head was clicked."""
        return self._look(subject, choice, head=_number(_sent(event), "head"))

    def pick_block(self, subject: Subject | None, choice: Choice | None, event: gr.EventData) -> list[Any]:
        """The map of a block was clicked."""
        sent = _sent(event)
        return self._look(subject, choice, place=(_number(sent, "stage"), _number(sent, "block")))

    def set_controls(
        self, subject: Subject | None, choice: Choice | None, stage: int, block: int, head: int
    ) -> list[Any]:
        """A stage, a block or a head was chosen; head 0 is all of them."""
        return self._look(subject, choice, place=(stage, block), head=head)

    def _start(self, subject: Subject) -> list[Any]:
        prediction = page.prediction(self.explorer.study(subject))
        return [None, subject, prediction, *self._show(subject, self.explorer.first_choice(subject))]

    def _look(self, subject: Subject | None, choice: Choice | None, **picked: Any) -> list[Any]:
        if subject is None or choice is None:  # the page is older than the server
            _tell("The picture is no longer open: choose one again.")
            return _same(LOOK)
        try:
            return self._show(subject, replace(choice, **picked))
        except ValueError as error:
            _tell(f"Click on the clear part: {error}.")
            return _same(LOOK)

    def _show(self, subject: Subject, choice: Choice) -> list[Any]:
        study = self.explorer.study(subject)
        explanations = study.explain(choice.at)
        choice = self.explorer.settle(choice, explanations)
        stage, block = choice.place
        here = explanations[choice.place]
        heads = [("all", 0), *((str(head), head) for head in range(1, len(here.values) + 1))]
        return [
            choice,
            page.photograph(subject, choice.at),
            gr.Radio(value=stage),
            gr.Radio(choices=self.explorer.blocks[stage], value=block),
            gr.Radio(choices=heads, value=choice.head),
            page.branches(study, here, choice),
            page.heads(study, here, choice),
            page.stages(study, explanations, choice),
            page.exactness(here),
        ]


def _same(outputs: tuple[str, ...]) -> list[Any]:
    return [gr.skip() for _ in outputs]


def _tell(message: str) -> None:
    """A message that goes away by itself; it is shown as HTML, and may hold the name of a file."""
    gr.Warning(escape(message), MESSAGE_SECONDS)


def _sent(event: gr.EventData) -> dict[str, Any]:
    return event._data if isinstance(event._data, dict) else {}


def _number(sent: dict[str, Any], name: str) -> int:
    try:
        return int(sent[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        return -1
