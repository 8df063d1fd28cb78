"""Policy and erasing in the data paths: the same for whoever reads a sample, and nothing where it is not asked for."""

import hashlib

import numpy as np
import pytest
import torch
from pictures import joined, open_small, same, write_folder

from gsanet.train.data import DataSettings
from gsanet.train.data.augment import training_views

# Three workers on fewer cores are slow, and right.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BOTH = {"policy": "trivial", "erase": 0.5}


def fingerprint(*arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def of_batches(batches):
    return fingerprint(*(array.numpy() for images, labels in batches for array in (images.permute(0, 2, 3, 1), labels)))


@pytest.mark.parametrize("kind", ["memory", "loader"])
@pytest.mark.parametrize(("augment", "expected"), [("crop", "55c391dabbdc196e"), ("none", "7a0d6873722a7410")])
def test_recipes_that_ask_for_neither_see_what_they_always_saw(kind, augment, expected):
    """Bit for bit as in the release before there were any."""
    settings = {"img_size": (8, 8), "augment": augment, "padding": 1, "crop_pct": 1.0}
    data = open_small("digits", kind, batch_size=64, **settings)
    assert of_batches(data.train.batches(2)) == expected
    assert of_batches(data.val.batches()) == "d14440da66b270de"


def test_random_boxes_are_those_that_always_were():
    sizes = np.tile((90, 60), (1000, 1))
    views = training_views(DataSettings(img_size=(32, 32)), sizes, np.arange(1000), seed=1, epoch=2)
    assert fingerprint(*(part.astype(np.int64) for part in views)) == "269a937d68793108"


def test_evaluation_sees_neither(open_kind):
    assert same(open_kind(**BOTH).val.batches(), open_kind().val.batches())


@pytest.mark.parametrize("settings", [{"policy": "trivial"}, {"erase": 0.5}], ids=str)
def test_training_sees_each(open_kind, settings):
    assert not same(open_kind(**settings).train.batches(0), open_kind().train.batches(0))


def test_a_sample_is_changed_the_same_way_by_whoever_reads_it(open_kind):
    """Two processes with workers that begin in the middle of an epoch, and one that reads all of it."""
    alone = list(open_kind(**BOTH).train.batches(4))
    parts = [open_kind(rank=rank, world_size=2, workers=2, **BOTH).train.batches(4, 2) for rank in range(2)]
    assert same(joined(parts), alone[2:])


@pytest.mark.parametrize("settings", [{"policy": "trivial"}, {"erase": 1.0}, BOTH], ids=str)
def test_both_paths_show_the_same(tmp_path, settings):
    """To the last bit where nothing is resized."""
    write_folder(tmp_path / "folder", train=40, sizes=((24, 24),))
    options = {"img_size": (24, 24), "augment": "crop", **settings}
    memory, loader = (open_small(tmp_path / "folder", kind, **options) for kind in ("memory", "loader"))
    for epoch in range(2):
        assert same(memory.train.batches(epoch), loader.train.batches(epoch))


def test_both_paths_show_the_same_of_resized_images(folder):
    """But for the level by which resized pixels differ, which an operation can make more of."""
    memory, loader = (open_small(folder, kind, **BOTH) for kind in ("memory", "loader"))
    one, other = (torch.cat([images for images, _ in each.train.batches(1)]) for each in (memory, loader))
    levels = (one - other).abs() * 0.229 * 255
    assert (levels < 2.5).float().mean() > 0.98


def test_what_is_erased_is_zero_for_the_network(open_kind):
    mean, std = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)
    plain, erased = (open_kind(mean=mean, std=std, erase=p).train.batches(0) for p in (0.0, 1.0))
    for (images, _), (changed, _) in zip(plain, erased, strict=True):
        differs = images != changed
        assert differs.flatten(1).any(1).all()
        # Pixels are whole numbers, so that a value is the nearest to the mean that one can have.
        assert (changed[differs].abs() <= 0.5001 / 255 / min(std)).all()


def test_epochs_differ(folder):
    settings = {"augment": "none", "crop_pct": 1.0, **BOTH}
    data = open_small(folder, "memory", **settings)
    seen = [
        {image.numpy().tobytes() for images, _ in data.train.batches(epoch) for image in images} for epoch in (0, 1)
    ]
    assert len(seen[0] & seen[1]) < len(seen[0]) / 2


def test_an_unusual_mean_is_no_unusual_pixel(folder):
    """A mean that no pixel can have is erased with the nearest value, not with one that wraps around."""
    data = open_small(folder, "loader", mean=(-0.5, 0.5, 1.5), erase=1.0)
    assert all(images.isfinite().all() for images, _ in data.train.batches(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU is never waited for")
def test_no_batch_waits_for_the_gpu(folder):
    batches = open_small(folder, "memory", device="cuda", **BOTH).train.batches(0)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(batches)) > 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
