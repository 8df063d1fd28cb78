"""One distribution of augmentations: that of torchvision, on both paths."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import open_small, picture, write_folder
from scipy.stats import binomtest, chisquare, ks_2samp
from torchvision.transforms import v2

from gsanet.train.data import DataSettings
from gsanet.train.data.augment import Views, evaluation_views, render, render_batch, training_views, view_table

COUNT = 4000


def same_distribution(one, other):
    return ks_2samp(one, other, method="asymp").pvalue > 1e-3


def drawn(settings, size, count=COUNT, epoch=0):
    return training_views(settings, np.tile(size, (count, 1)), np.arange(count), seed=1, epoch=epoch)


@pytest.mark.parametrize("size", [(64, 64), (90, 60), (40, 200), (300, 20), (5, 5), (1, 3)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.5), (0.5, 3.0))])
def test_boxes_are_distributed_as_torchvisions(size, scale, ratio):
    """In every size, those included where no box fits and the largest one in the middle is taken."""
    settings = DataSettings(img_size=(32, 32), scale=scale, ratio=ratio)
    ours = drawn(settings, size).box
    transform = v2.RandomResizedCrop(32, scale=scale, ratio=ratio)
    image = torch.empty(3, *size)
    names = ("top", "left", "height", "width")
    params = (transform.make_params([image]) for _ in range(COUNT))
    theirs = np.array([[each[name] for name in names] for each in params])
    for column in range(4):
        assert same_distribution(ours[:, column], theirs[:, column]), names[column]
    assert same_distribution(ours[:, 2] / ours[:, 3], theirs[:, 2] / theirs[:, 3])
    assert same_distribution(ours[:, 2:].prod(1), theirs[:, 2:].prod(1))


def test_padded_crops_are_distributed_as_torchvisions():
    """Torchvision's random crop takes every offset from -padding to padding, each as likely, rows as columns."""
    settings = DataSettings(img_size=(32, 32), augment="crop", padding=2)
    offsets = drawn(settings, (32, 32)).offset
    places = np.bincount((offsets[:, 0] + 2) * 5 + offsets[:, 1] + 2, minlength=25)
    assert len(places) == 25
    assert chisquare(places).pvalue > 1e-3


@pytest.mark.parametrize("augment", ["crop", "resized_crop"])
@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips_are_as_likely_as_said(augment, probability):
    settings = DataSettings(img_size=(32, 32), augment=augment, flip=probability)
    flips = int(drawn(settings, (40, 40)).flip.sum())
    assert binomtest(flips, COUNT, probability).pvalue > 1e-3


def test_draws_are_unrelated_to_each_other():
    views = drawn(DataSettings(img_size=(32, 32)), (256, 256))
    room = 257 - views.box[:, 2:]
    columns = np.stack([*(views.box[:, :2] / room).T, *np.log(views.box[:, 2:]).T[:1], views.flip])
    correlation = np.corrcoef(columns) - np.eye(4)
    # The corner of a small box has more room, but where it lies in that room is free.
    assert np.abs(correlation).max() < 4 / np.sqrt(COUNT)


@pytest.mark.parametrize("size", [(32, 32), (50, 32), (33, 97), (100, 80), (20, 10)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875, 0.5])
def test_evaluation_sees_what_torchvision_would_show(size, crop_pct):
    image = picture(3, size)
    settings = DataSettings(img_size=(28, 28), crop_pct=crop_pct)
    transform = v2.Compose([v2.PILToTensor(), v2.Resize(int(28 / crop_pct)), v2.CenterCrop(28)])
    ours = render(image, evaluation_views(settings, np.array([size])), 0, (28, 28))
    assert torch.equal(ours, transform(image))


def test_padded_crop_is_what_torchvision_would_show():
    image, settings = picture(4, (40, 40)), DataSettings(img_size=(40, 40), augment="crop", padding=3, flip=0.0)
    views = drawn(settings, (40, 40), 20)
    padded = v2.functional.pad(v2.functional.pil_to_tensor(image), [3, 3])
    for row, (top, left) in enumerate(views.offset + 3):
        assert torch.equal(render(image, views, row, (40, 40)), padded[:, top : top + 40, left : left + 40])


sides = st.integers(1, 40)


@given(st.data(), sides, sides, sides, sides)
def test_batch_and_single_rendering_agree(data, height, width, out_height, out_width):
    """Whatever the view: larger, smaller, partly beside the image, mirrored."""
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    box = [top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))]
    resized = [data.draw(sides), data.draw(sides)]
    offset = [
        data.draw(st.integers(1 - out, most - 1)) for out, most in zip((out_height, out_width), resized, strict=True)
    ]
    views = Views(np.array([box]), np.array([resized]), np.array([offset]), np.array([data.draw(st.booleans())]))
    size = (out_height, out_width)
    image = picture(0, (height, width))
    one = render(image, views, 0, size).float()
    stored = v2.functional.pil_to_tensor(image).permute(1, 0, 2)[None]  # batch, height, channel, width
    batch = render_batch(stored.contiguous(), view_table(views), size)
    assert batch.shape == (1, 3, *size)
    assert (one - batch[0]).abs().max() <= 1  # of 255: torchvision rounds between its two passes


@pytest.mark.parametrize("size", [(20, 24), (16, 16), (40, 30)], ids=str)
@pytest.mark.parametrize("augment", ["crop", "resized_crop", "none"])
def test_both_paths_show_the_same_views(tmp_path, augment, size):
    """Same box, same place, same flip for every sample: no two of them look so much alike by chance."""
    write_folder(tmp_path / "folder", sizes=(size,))
    memory, loader = (open_small(tmp_path / "folder", kind, augment=augment) for kind in ("memory", "loader"))
    passes = ((each.train.batches(3), each.val.batches()) for each in (memory, loader))
    for split, (one, other) in zip(("train", "val"), zip(*passes, strict=True), strict=True):
        for (images, labels), (same_images, same_labels) in zip(one, other, strict=True):
            assert torch.equal(labels, same_labels)
            exact = split == "train" and augment == "crop" and size == (16, 16)  # nothing is resized
            assert (images - same_images).abs().max() * 0.229 * 255 < (1e-9 if exact else 1.5)


def test_streamed_samples_are_drawn_like_all_others(shards):
    """What a sample looks like depends on its index in the split, however it is read."""
    data = open_small(f"wds:{shards}/train/*.tar|{shards}/val/*.tar", augment="resized_crop")
    settings = data.train.plan.settings
    expected = set()
    for number in range(data.train.num_samples):
        image = picture(number, (18 + number % 5, 24))
        views = training_views(settings, np.array([[image.height, image.width]]), np.array([number]), seed=3, epoch=2)
        expected.add(render(image, views, 0, settings.img_size).numpy().tobytes())
    for images, _ in data.train.batches(2):
        pixels = images * torch.tensor(settings.std).view(3, 1, 1) + torch.tensor(settings.mean).view(3, 1, 1)
        for image in (pixels * 255).round().to(torch.uint8):
            assert image.contiguous().numpy().tobytes() in expected
