"""Images that do not decode: counted, named, skipped; and past a stated share, the end of the run."""

from collections.abc import Callable, Iterable, Sequence

from PIL import Image

from gsanet.images import to_rgb
from gsanet.train.data.sources import some


class DamagedDataError(OSError):
    """More images than allowed do not decode."""


def decode(open_sample: Callable[[], tuple[Image.Image, int]]) -> tuple[Image.Image, int] | None:
    """An upright RGB image, the same as prediction reads, and its label; None if the sample is damaged."""
    try:
        image, label = open_sample()
        with image:
            return to_rgb(image, "the image"), label
    except Exception:  # what a damaged file makes PIL raise has no common class
        return None


class Damage:
    """The damaged samples of one split that this process has met."""

    def __init__(self, split: str, total: int, max_fraction: float) -> None:
        self.split, self.total, self.max_fraction = split, total, max_fraction
        self.names: dict[str, None] = {}  # a set that keeps its order

    def add(self, names: Iterable[str]) -> None:
        """Remember damaged samples, and stop when they are too many."""
        self.names.update(dict.fromkeys(names))
        if len(self.names) > allowed(self.total, self.max_fraction):
            raise DamagedDataError(
                f"{len(self.names)} of {self.total} {self.split} images do not decode "
                f"({len(self.names) / self.total:.2%}, and data.max_bad_fraction allows {self.max_fraction:.2%}): "
                + ", ".join(list(self.names)[:3])
            )


def skipped_words(names: Sequence[str]) -> str:
    """What to say of images that were skipped; nothing if none were."""
    if not names:
        return ""
    images, were = ("images", "were") if len(names) > 1 else ("image", "was")
    return f"{len(names):,} {images} could not be decoded and {were} skipped: {some(names)}"


def allowed(total: int, max_fraction: float) -> int:
    """How many damaged samples a split may have."""
    return int(total * max_fraction)
