"""The order of an epoch depends on (seed, epoch), a sample's augmentation on (seed, epoch, sample), on nothing else."""

import os

import pytest
import torch
from pictures import joined, open_small, same

# Three workers on fewer cores are slow, and right.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_an_epoch_can_be_started_anywhere(open_kind):
    train = open_kind().train
    whole = list(train.batches(2))
    assert len(whole) == len(train) >= 3
    for start in range(len(train) + 1):
        assert same(train.batches(2, start), whole[start:])


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_batch_of_one(open_kind, world_size):
    alone = list(open_kind().train.batches(1))
    parts = [open_kind(rank=rank, world_size=world_size).train.batches(1) for rank in range(world_size)]
    assert same(joined(parts), alone)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(open_kind, workers):
    without, with_workers = open_kind(), open_kind(workers=workers)
    assert same(with_workers.train.batches(1, 1), list(without.train.batches(1))[1:])
    assert sorted(labels(with_workers.val)) == sorted(labels(without.val))


def test_two_processes_with_workers_resumed(open_kind):
    alone = list(open_kind().train.batches(4))
    parts = [open_kind(rank=rank, world_size=2, workers=2).train.batches(4, 2) for rank in range(2)]
    assert same(joined(parts), alone[2:])


def test_epochs_and_seeds_differ(open_kind):
    data = open_kind()
    first = list(data.train.batches(0))
    assert same(data.train.batches(0), first)
    assert not same(data.train.batches(1), first)
    assert not same(open_kind(seed=4).train.batches(0), first)


def test_an_abandoned_epoch_leaves_no_trace(open_kind):
    data = open_kind(workers=2)
    expected = list(open_kind().train.batches(1))
    next(data.train.batches(0))
    assert same(data.train.batches(1), expected)


def test_global_generator_is_left_alone(open_kind):
    data = open_kind(workers=2)
    before = torch.get_rng_state()
    list(data.train.batches(0))
    list(data.val.batches())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch_size", [8, 6, 1])
def test_an_epoch_holds_every_sample_at_most_once(open_kind, batch_size):
    data = open_kind(batch_size=batch_size, augment="none", crop_pct=1.0)
    images = torch.cat([images for images, _ in data.train.batches(0)])
    assert len(images) == len(data.train) * batch_size > data.train.num_samples - batch_size
    assert len(images.flatten(1).unique(dim=0)) == len(images)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 3), (2, 3), (4, 0)])
def test_evaluation_sees_every_sample_once(open_kind, world_size, workers):
    seen = []
    for rank in range(world_size):
        val = open_kind(rank=rank, world_size=world_size, workers=workers, crop_pct=1.0).val
        batches = list(val.batches())
        assert len(batches) == len(val)
        assert all(len(labels) <= 8 // world_size for _, labels in batches)
        seen += [images for images, _ in batches]
    images = torch.cat(seen)
    assert len(images) == val.num_samples
    assert len(images.flatten(1).unique(dim=0)) == len(images)


def test_batches_are_what_a_network_takes(open_kind):
    data = open_kind(mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0), img_size=(12, 20))
    for images, labels in [next(data.train.batches(0)), next(data.val.batches())]:
        assert images.shape == (8, 3, 12, 20)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert images.is_contiguous(memory_format=torch.channels_last)
        pixels = (images * torch.tensor([0.25, 0.5, 1.0]).view(1, 3, 1, 1) + 0.5) * 255
        assert (pixels - pixels.round()).abs().max() < 1e-3
        assert pixels.min() > -0.5
        assert pixels.max() < 255.5


def test_labels_go_with_their_images(open_kind):
    """Without augmentation an image is recognised in every epoch, and its label is always the same."""
    data = open_kind(augment="none")
    known = {}
    for epoch in range(3):
        for images, labels in data.train.batches(epoch):
            for image, label in zip(images, labels.tolist(), strict=True):
                assert known.setdefault(image.numpy().tobytes(), label) == label
    assert len(known) <= data.train.num_samples
    assert set(known.values()) == {0, 1, 2}


def test_a_worker_that_dies_is_reported(folder, monkeypatch):
    monkeypatch.setattr("gsanet.train.data.loader.decode", lambda open_sample: os._exit(1))
    with pytest.raises(OSError, match="a decoding process died"):
        list(open_small(folder, "loader", workers=2).train.batches(0))


@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
def test_every_device_shows_the_same(folder, device, augment):
    here = open_small(folder, "memory", augment=augment)
    there = open_small(folder, "memory", augment=augment, device=device)
    for (images, labels), (their_images, their_labels) in zip(
        here.train.batches(0), there.train.batches(0), strict=True
    ):
        assert their_images.device.type == their_labels.device.type == device
        assert torch.equal(their_labels.cpu(), labels)
        assert (their_images.cpu() - images).abs().max() * 0.229 * 255 < 1.5


def labels(loader):
    return [label for _, labels in loader.batches() for label in labels.tolist()]
