"""Tar shards in the WebDataset format: which there are, how many samples each holds, and reading one as a stream.

Beside the shards may lie `sizes.json` (the number of samples of each shard, by file name) and `classnames.txt` (one
class a line, in the order of the labels). Local shards without them are counted; over HTTP they are needed.
"""

import glob
import io
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, islice
from typing import IO, NamedTuple

import numpy as np
from PIL import Image

from gsanet.train.data.augment import Ints
from gsanet.words import first_line

IMAGE_KEYS = ("jpg", "jpeg", "png")
LABEL_KEY = "cls"
ATTEMPTS = 3  # to read a shard over HTTP; each goes on after the last sample that came through
TIMEOUT = 60  # seconds without a byte


class Sample(NamedTuple):
    """One sample as it lies in a shard."""

    name: str
    image: bytes
    label: bytes

    def open(self) -> tuple[Image.Image, int]:
        """The image, not yet decoded, and its label."""
        return Image.open(io.BytesIO(self.image)), int(self.label)


@dataclass(frozen=True)
class Shards:
    """The shards of one split."""

    urls: list[str]
    sizes: Ints
    class_names: list[str]

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def read(self, shard: int, start: int = 0) -> Iterator[Sample]:
        """The samples of one shard, in the order in which they lie there."""
        url, size = self.urls[shard], int(self.sizes[shard])
        for attempt in range(ATTEMPTS):
            try:
                for sample in islice(_stream(url), start, size):
                    yield sample
                    start += 1
                if start < size:
                    raise EOFError(f"it holds {start} samples where {size} are expected")
                return
            except (OSError, EOFError, tarfile.TarError) as error:
                if attempt + 1 == ATTEMPTS or not _is_remote(url):
                    raise OSError(f"cannot read shard {url}: {first_line(error)}") from error


def open_shards(pattern: str) -> Shards:
    """Find the shards of one split.

    Args:
        pattern: Local files, with `*` and `{0000..0099}`, or http(s) URLs, with the latter.
    """
    from braceexpand import braceexpand

    parts = list(braceexpand(pattern))
    urls = [url for part in parts for url in ([part] if _is_remote(part) else sorted(glob.glob(part)))]
    if not urls:
        raise FileNotFoundError(f"no tar shards match {pattern!r}")
    folder = urls[0][: urls[0].rfind("/") + 1]
    listed, names = _read_beside(folder + "sizes.json"), _read_beside(folder + "classnames.txt")
    if listed is not None and names is not None:
        return Shards(urls, _listed_sizes(listed, urls), names.splitlines())
    if _is_remote(urls[0]):
        raise FileNotFoundError(f"{folder} lacks {'sizes.json' if listed is None else 'classnames.txt'}")
    with ThreadPoolExecutor() as pool:
        sizes, classes = zip(*pool.map(_count, urls), strict=True)
    class_names = [str(label) for label in range(max(classes))] if names is None else names.splitlines()
    return Shards(urls, np.array(sizes), class_names)


def _is_remote(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _open(url: str) -> IO[bytes]:
    # Not webdataset's own opener: it also runs commands (`pipe:...`), and a recipe must not be able to.
    return urllib.request.urlopen(url, timeout=TIMEOUT) if _is_remote(url) else open(url, "rb")


def _read_beside(url: str) -> str | None:
    try:
        with _open(url) as file:
            return file.read().decode().strip()
    except (FileNotFoundError, urllib.error.HTTPError):
        return None


def _listed_sizes(text: str, urls: list[str]) -> Ints:
    sizes = json.loads(text)
    names = [url.rpartition("/")[2] for url in urls]
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ValueError(f"sizes.json does not list {missing[0]}, one of {len(missing)} such shards")
    return np.array([sizes[name] for name in names], dtype=np.int64)


def _stream(url: str) -> Iterator[Sample]:
    """All samples of a shard that have an image and a label."""
    with _open(url) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
        for key, members in _grouped(archive):
            # A stream is read as it comes: each part before the next is looked for.
            parts = {extension: _content(archive, member) for extension, member in members}
            image = next((parts[each] for each in IMAGE_KEYS if each in parts), None)
            if image is not None and LABEL_KEY in parts:
                yield Sample(f"{url}/{key}", image, parts[LABEL_KEY])


def _count(path: str) -> tuple[int, int]:
    """Samples of a local shard, and one more than its largest label; images are passed over, not read."""
    samples, classes = 0, 0
    try:
        with tarfile.open(path) as archive:
            for _, members in _grouped(archive):
                parts = dict(members)
                if LABEL_KEY in parts and any(each in parts for each in IMAGE_KEYS):
                    samples += 1
                    classes = max(classes, 1 + int(_content(archive, parts[LABEL_KEY])))
    except (
        OSError,
        tarfile.TarError,
        ValueError,
    ) as error:  # of no format at all, tarfile says why for each that it knows
        raise OSError(f"cannot read shard {path}: {first_line(error).rstrip(':')}") from error
    return samples, classes


Members = Iterator[tuple[str, tarfile.TarInfo]]


def _grouped(archive: tarfile.TarFile) -> Iterator[tuple[str, Members]]:
    """The files of each sample: neighbours of one path up to the first dot of the name, by what follows it."""
    files = (member for member in archive if member.isreg())
    for sample, members in groupby(files, key=lambda member: _split(member)[0]):
        yield sample, ((_split(member)[1], member) for member in members)


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    folder, slash, name = member.name.rpartition("/")
    stem, _, extension = name.partition(".")
    return folder + slash + stem, extension.lower()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # a regular file has content
    return file.read()
