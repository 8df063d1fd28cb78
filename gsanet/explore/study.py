"""What the explorer knows: the picture at hand, what the network makes of it, and the maps of one of its pixels."""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from gsanet.explain.image import choose_module, gsa_places
from gsanet.explain.maps import Array, Explanation, Reading, gsa_modules, map_pixel, read_module, recorded_inputs
from gsanet.explore.samples import sample_pictures
from gsanet.images import Picture, UnreadableImageError, read_image
from gsanet.predict import Classifier, Guess, View

Place = tuple[int, int]  # stage and block, both counted from 1
BRANCHES = ("both", "content", "position", "column", "row")
KEPT_STUDIES = 4
DISPLAYED = 720  # pixels of the longer side, at most


@dataclass(frozen=True, eq=False)
class Subject:
    """A picture that was opened, with no more of it kept than is needed.

    Attributes:
        name: What to call it.
        note: What a user should know of how it was read.
        displayed: The picture, no larger than it is shown.
        view: Which part of the original the network sees.
        seen: The network's input, (3, height, width).
    """

    name: str
    note: str
    displayed: Image.Image
    view: View
    seen: Tensor

    @property
    def middle(self) -> tuple[int, int]:
        """The pixel (X, Y) in the middle of what is seen."""
        left, top, right, bottom = self.view.box
        return math.ceil((left + right) / 2) - 1, math.ceil((top + bottom) / 2) - 1


@dataclass(frozen=True)
class Choice:
    """What is looked at.

    Attributes:
        at: The pixel of the picture, (X to the right, Y down).
        place: The stage and the block.
        head: Counted from 1; 0 for all.
        branch: Which map is shown of every head and of every block, one of `BRANCHES`.
    """

    at: tuple[int, int]
    place: Place
    head: int = 0
    branch: str = BRANCHES[0]


@dataclass(frozen=True, eq=False)
class Study:
    """What the network makes of a subject: its guesses, and each GSA module read once for all pixels."""

    subject: Subject
    guesses: tuple[Guess, ...]
    readings: dict[Place, Reading]

    def explain(self, at: tuple[int, int]) -> dict[Place, Explanation]:
        """The weights of one pixel of the picture, in every module.

        Raises:
            ValueError: Where the network does not see that pixel.
        """
        view = self.subject.view
        place = view.locate(*at)
        return {
            where: reading.at(map_pixel(place, view.input_size, reading.size))
            for where, reading in self.readings.items()
        }


def branch_maps(explanation: Explanation) -> dict[str, Array]:
    """The weights of each branch that a module has, (head, height, width), in the order of `BRANCHES`.

    The map of the column holds the weights of all pixels of the row, each along its own column: what the row then
    gathers. Where there is no row, it holds those of the pixel alone.
    """
    content, column, row = explanation.content, explanation.column, explanation.row
    found: dict[str, Array | None] = {
        "both": explanation.total if content is not None and explanation.positional is not None else None,
        "content": content,
        "position": explanation.scaled_positional if column is not None and row is not None else None,
        "column": None,
        "row": None,
    }
    if column is not None:
        found["column"] = explanation.positional if row is None else column.transpose(0, 2, 1)
    if row is not None:
        alone = np.zeros(explanation.values.shape[:3], row.dtype)
        alone[:, explanation.pixel[0]] = row
        found["row"] = alone
    return {branch: weights for branch, weights in found.items() if weights is not None}


class Explorer:
    """A trained network and what it made of the last few pictures.

    Args:
        classifier: The network; one without GSA modules is refused.
    """

    def __init__(self, classifier: Classifier):
        self.classifier = classifier
        self.places = gsa_places(classifier.model)
        usual = choose_module(classifier.model, classifier.name)
        self.usual_place = next(place for place, name in self.places.items() if name == usual)
        self.samples = sample_pictures(classifier.class_names, classifier.transform.settings.img_size)
        self._studies: OrderedDict[str, Study] = OrderedDict()
        self._lock = threading.Lock()  # requests come in threads, and inputs are recorded on the one network

    @property
    def blocks(self) -> dict[int, list[int]]:
        """The blocks with a GSA module, by stage."""
        found: dict[int, list[int]] = {}
        for stage, block in self.places:
            found.setdefault(stage, []).append(block)
        return found

    def open_file(self, file: str | Path) -> Subject:
        """Open a picture of any kind.

        Raises:
            UnreadableImageError: With the reason.
        """
        name = Path(file).name
        return self._open(name, lambda: read_image(file, name))

    def open_sample(self, name: str) -> Subject:
        """Open one of `samples`."""
        if name not in self.samples:
            raise ValueError(f"there is no sample {name!r}: the samples are {', '.join(self.samples)}")
        return self._open(name, lambda: Picture(self.samples[name]))

    def _open(self, name: str, read: Callable[[], Picture]) -> Subject:
        with self._lock:  # a large picture takes much memory: one at a time
            picture = read()
            displayed = picture.image.copy()
            displayed.thumbnail((DISPLAYED, DISPLAYED))
            transform = self.classifier.transform
            view, seen = transform.view(picture.image), transform(picture.image)
        subject = Subject(name, picture.note, displayed, view, seen)
        try:
            view.locate(*subject.middle)
        except ValueError:  # one pixel wide, and cut between two pixels
            raise UnreadableImageError(f"{name} is too narrow to click in") from None
        return subject

    def first_choice(self, subject: Subject) -> Choice:
        """What is looked at first."""
        return Choice(subject.middle, self.usual_place)

    def settle(self, choice: Choice, explanations: dict[Place, Explanation]) -> Choice:
        """The nearest choice that exists: not all stages have as many blocks, nor all blocks the same branches."""
        stage, block = choice.place
        blocks = self.blocks
        stage = stage if stage in blocks else self.usual_place[0]
        place = stage, (block if block in blocks[stage] else blocks[stage][-1])
        explanation = explanations[place]
        branches = branch_maps(explanation)
        head = choice.head if 0 <= choice.head <= len(explanation.values) else 0
        return replace(
            choice, place=place, head=head, branch=choice.branch if choice.branch in branches else next(iter(branches))
        )

    def study(self, subject: Subject) -> Study:
        """What the network makes of a subject; the last few are kept."""
        key = hashlib.sha256(subject.seen.numpy().tobytes()).hexdigest()
        with self._lock:
            if key not in self._studies:
                self._studies[key] = self._study(subject)
                if len(self._studies) > KEPT_STUDIES:
                    self._studies.popitem(last=False)
            self._studies.move_to_end(key)
            return replace(self._studies[key], subject=subject)

    def _study(self, subject: Subject) -> Study:
        modules = gsa_modules(self.classifier.model)
        names = {name: place for place, name in self.places.items()}
        with recorded_inputs({name: modules[name] for name in names}) as inputs:
            (guesses,) = self.classifier.classify([subject.seen])
        readings = {place: read_module(modules[name], inputs[name], name) for name, place in names.items()}
        return Study(subject, guesses, readings)
