"""Pictures of all kinds as the RGB images that networks take."""

import http.client
import io
import os
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

EXTENSIONS = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
MAX_PIXELS = 100_000_000
MAX_RATIO = 1000  # of the sides: resized to cover a network's input, a longer strip would fill the memory
MAX_DOWNLOAD = 200_000_000  # bytes
TIMEOUT = 20  # seconds without a byte


class UnreadableImageError(OSError):
    """A file or address that gives no image, with the reason."""


@dataclass(frozen=True)
class Picture:
    """An upright RGB image, and what a user should know of how it was read."""

    image: Image.Image
    note: str = ""


def find_images(sources: Sequence[str | Path]) -> list[str]:
    """The images that a user means: files and addresses as they are, folders with all that is below them, sorted.

    A folder without images is named as what cannot be read, if there is anything else.
    """
    found: list[str] = []
    empty: list[str] = []
    for source in map(str, sources):
        if _is_url(source) or not Path(source).is_dir():
            found.append(source)
            continue
        below = (file for file in Path(source).rglob("*") if is_image(str(file.relative_to(source))))
        files = (file for file in below if file.is_file())
        inside = sorted(map(str, files))
        found += inside
        empty += [] if inside else [source]
    if empty and not found:
        folders = ", ".join(empty)
        raise ValueError(f"there are no images in {folders}: looked for files ending in {', '.join(EXTENSIONS)}")
    return found + empty


def is_image(name: str) -> bool:
    """Whether a file is meant when its folder is: an image by its ending, and not hidden.

    Hidden files and folders are other programs' own: macOS's notes on an image have the image's ending.

    Args:
        name: Its path below that folder.
    """
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".") and f"{os.sep}." not in name


def read_image(source: str | Path, name: str = "") -> Picture:
    """Read an image from a file or an http(s) address.

    It is turned upright as its EXIF data say; transparency is laid on white; of 16 bits the upper eight are kept; of an
    animation it is the first frame. More than 100 megapixels are refused before they are decoded, and so are strips
    over a thousand times as long as wide.

    Args:
        source: The file or the address.
        name: What to call it in a complaint. Default: `source`.

    Raises:
        UnreadableImageError: With the reason.
    """
    address = str(source)
    name = name or address
    content = _download(address) if _is_url(address) else None
    if content is None and Path(address).is_dir():
        raise UnreadableImageError(f"{name} is a folder, with no images in it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked below
            opened = Image.open(address if content is None else io.BytesIO(content))
        with opened:
            width, height = opened.size
            if width * height > MAX_PIXELS:
                raise UnreadableImageError(f"{name} has {width}x{height} pixels: more than 100 megapixels are refused")
            if max(width, height) > MAX_RATIO * min(width, height):
                raise UnreadableImageError(
                    f"{name} has {width}x{height} pixels: one side is over {MAX_RATIO} times the other"
                )
            frames = getattr(opened, "n_frames", 1)
            note = f"the first of {frames} frames" if frames > 1 else ""
            return Picture(to_rgb(opened, name), note)
    except UnreadableImageError:
        raise
    except FileNotFoundError:
        raise UnreadableImageError(f"there is no file {name}") from None
    except UnidentifiedImageError:
        raise UnreadableImageError(f"{name} is not an image of a known kind") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError(f"{name}: more than 100 megapixels are refused") from None
    except Exception as error:  # what a damaged file makes PIL raise has no common class
        raise UnreadableImageError(f"{name} cannot be read: {error}") from error


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An image as networks take it, in training as in `read_image`, which says what becomes of it.

    Args:
        image: As PIL opened it; it may be changed.
        name: What to call it in a complaint.
    """
    ImageOps.exif_transpose(image, in_place=True)
    mode = image.mode
    if mode in ("I", "F"):
        # A PNG has no more than 16 bits, though some versions of PIL open it as 32.
        least, most = (float(value) for value in image.getextrema())  # type: ignore[arg-type]
        if mode == "F" or not (image.format == "PNG" or 0 <= least <= most <= 0xFFFF):
            raise UnreadableImageError(f"{name} holds 32-bit numbers, and does not say which of them is white")
        return _from_16_bits(image)
    if mode.startswith("I;16"):
        return _from_16_bits(image)
    if "transparency" in image.info or mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        if mode in ("La", "PA"):
            image = image.convert("LA" if mode == "La" else "RGBA")
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """The upper eight bits; PIL's own conversion cuts off everything above 255 instead."""
    return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")


def _is_url(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def _download(url: str) -> bytes:
    # Some hosts refuse a client that does not say who it is.
    request = urllib.request.Request(url, headers={"User-Agent": "gsanet"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            content: bytes = response.read(MAX_DOWNLOAD + 1)
    except urllib.error.HTTPError as error:
        raise UnreadableImageError(f"{url} cannot be downloaded: {error.code} {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UnreadableImageError(f"{url} cannot be downloaded: {reason}") from None
    if len(content) > MAX_DOWNLOAD:
        raise UnreadableImageError(f"{url} is larger than {MAX_DOWNLOAD // 1_000_000} MB")
    return content
