"""Images that do not decode: counted, named, skipped; and past a stated share, the end of the run."""

import warnings
from collections.abc import Callable, Iterable, Mapping

from PIL import Image, UnidentifiedImageError

from gsanet.images import to_rgb
from gsanet.train.data.sources import some
from gsanet.words import count, first_line

Damaged = tuple[str, str]  # the name of a sample, and why it does not decode


class DamagedDataError(OSError):
    """More images than allowed do not decode."""


def decode(open_sample: Callable[[], tuple[Image.Image, int]]) -> tuple[Image.Image, int] | str:
    """An upright RGB image, the same as prediction reads, and its label; or why the sample does not decode."""
    try:
        image, label = open_sample()
        with image:
            return to_rgb(image, "it"), label
    except UnidentifiedImageError:
        return "not an image of a known kind"
    except Image.DecompressionBombError:
        return f"over {2 * (Image.MAX_IMAGE_PIXELS or 0) // 1_000_000} megapixels"
    except Exception as error:  # what a damaged file makes PIL raise has no common class
        return first_line(error)


def accept_large_images() -> None:
    """Have PIL say nothing of images over 89 megapixels, which are the user's own; twice as many it refuses."""
    # Not around each image: Python would then repeat all other warnings, which it shows once.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


class Damage:
    """The damaged samples of one split that this process has met."""

    def __init__(self, split: str, total: int, max_fraction: float) -> None:
        self.split, self.total, self.max_fraction = split, total, max_fraction
        self.reasons: dict[str, str] = {}

    def add(self, damaged: Iterable[Damaged]) -> None:
        """Remember damaged samples, and stop when they are too many."""
        self.reasons.update(damaged)
        found = len(self.reasons)
        if found > allowed(self.total, self.max_fraction):
            raise DamagedDataError(
                f"{found} of {self.total} {self.split} images do not decode "
                f"({found / self.total:.2%}, and data.max_bad_fraction allows {self.max_fraction:.2%}): "
                f"{_with_reasons(self.reasons)}. Remove {'it' if found == 1 else 'them'}{_or_allow(found, self.total)}"
            )


def skipped_words(reasons: Mapping[str, str]) -> str:
    """What to say of images that were skipped, by their names, and why; nothing if none were."""
    if not reasons:
        return ""
    were = "were" if len(reasons) > 1 else "was"
    return f"{count(len(reasons), 'image')} could not be decoded and {were} skipped: {_with_reasons(reasons)}"


def _with_reasons(reasons: Mapping[str, str]) -> str:
    return some([f"{name} ({reason})" for name, reason in reasons.items()])


def _or_allow(found: int, total: int) -> str:
    """How to go on in spite of so many damaged samples: with a limit in whole hundredths that allows them."""
    enough = (percent / 100 for percent in range(1, 100) if allowed(total, percent / 100) >= found)
    fraction = next(enough, None)
    return "" if fraction is None else f", or allow so many with `--set data.max_bad_fraction={fraction}` or more"


def allowed(total: int, max_fraction: float) -> int:
    """How many damaged samples a split may have."""
    return int(total * max_fraction)
