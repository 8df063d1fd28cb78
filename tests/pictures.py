"""Small data sets of made-up pictures, and what the tests of the data path ask of batches."""

import io

import numpy as np
import torch
from PIL import Image

from gsanet.train.data import DataSettings, open_data
from gsanet.train.data.settings import IMAGENET_MEAN, IMAGENET_STD

CLASSES = ("ant", "bee", "cat")


def picture(number, size=(20, 24)):
    """Smooth, as photographs are, and different for every number."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def encoded(image):
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def write_folder(root, train=10, val=5, sizes=((20, 24),)):
    """An ImageFolder tree with so many images a class; sizes take turns."""
    number = 0
    for split, count in (("train", train), ("val", val)):
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for _ in range(count):
                picture(number, sizes[number % len(sizes)]).save(folder / f"{number:04d}.png")
                number += 1
    return root


def write_shards(root, counts=(7, 9, 5, 11), start=0, size=None, spoil=None):
    """Tar shards as the WebDataset library writes them, of pictures of several sizes or one.

    `spoil` takes the number of a picture and its file's bytes, and returns what to write.
    """
    import webdataset

    root.mkdir(parents=True, exist_ok=True)
    number = start
    for shard, count in enumerate(counts):
        with webdataset.TarWriter(str(root / f"shard-{shard:02d}.tar"), encoder=False) as tar:
            for _ in range(count):
                image = encoded(picture(number, size or (18 + number % 5, 24)))
                image = spoil(number, image) if spoil else image
                label = str(number % len(CLASSES)).encode()
                tar.write({"__key__": f"{number:04d}", "png": image, "cls": label, "json": b"{}"})
                number += 1
    return root


def open_small(path, kind=None, batch_size=8, seed=3, rank=0, world_size=1, device="cpu", **settings):
    in_memory = {"memory": True, "loader": False}.get(kind)
    chosen = DataSettings(**{"img_size": (16, 16), "workers": 0, "in_memory": in_memory, **settings})
    place = {"rank": rank, "world_size": world_size, "device": torch.device(device)}
    return open_data(str(path), chosen, batch_size=batch_size, seed=seed, **place)


def same(left, right):
    """Whether two lists of batches hold the same bits."""
    left, right = list(left), list(right)
    assert len(left) == len(right)
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def joined(parts):
    """The batches of several processes, put together."""
    return [tuple(torch.cat(pieces) for pieces in zip(*ranks, strict=True)) for ranks in zip(*parts, strict=True)]


UNTOUCHED = {"img_size": (20, 24), "augment": "none", "crop_pct": 1.0}  # settings under which pictures stay as they are


def numbers(batches, known=range(200)):
    """Which pictures these batches show, in order."""
    by_pixels = {np.asarray(picture(number)).tobytes(): number for number in known}
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
    images = torch.cat([images for images, _ in batches])
    pixels = ((images * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return [by_pixels[image.numpy().tobytes()] for image in pixels]
