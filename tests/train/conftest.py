import numpy as np
import pytest
import torch
from PIL import Image

from gsanet.train.recipe import load_recipe

# Small enough for a step of a few milliseconds.
TINY = {"model_kwargs.width": 0.125, "model_kwargs.depths": [1, 1], "batch_size": 64}


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums in the same order in every process, so that weights can be compared bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_recipe():
    """A recipe on the digits with what is given set over it."""

    def make(**overrides):
        return load_recipe("quickstart", {**TINY, **overrides})

    return make


@pytest.fixture
def image_folder(tmp_path):
    """A folder of JPEGs: two classes, 12 training and 6 held-out images of each."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 6)):
        for label, name in enumerate(("dark", "light")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(128 * label, 128 * label + 128, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.jpg")
    return tmp_path / "images"
