"""Each change does to images what its name says, and nothing else."""

import pytest
import torch
from torch.testing import assert_close

from gsanet.stress import CHANGES
from gsanet.stress.changes import BLUR, NOISE, blur, flip, grey, noise, shift, shuffle, unchanged, zoom_in, zoom_out

WITHOUT_NOISE = [name for name in CHANGES if name != "noise"]
MOVING = ["flip", "shuffle-2x2", "shuffle-4x4"]


@pytest.fixture
def images(device):
    """Nine of 32x24 pixels: one more than fits into two turns of the four directions."""
    return torch.rand(9, 3, 32, 24, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture
def ramp(device):
    """Brighter by one for each pixel to the right, by 100 for each down, four times."""
    one = torch.arange(16.0)[:, None] * 100 + torch.arange(16.0)
    return one.expand(4, 3, 16, 16).to(device)


@pytest.mark.parametrize("name", CHANGES)
def test_images_stay_images(name, images):
    before = images.clone()
    changed = CHANGES[name](images)
    assert changed.shape == images.shape
    assert changed.dtype == images.dtype
    assert changed.device == images.device
    assert changed.min() >= 0
    assert changed.max() <= 1 + 1e-6
    assert torch.equal(images, before)
    assert torch.equal(changed, CHANGES[name](images))
    assert torch.equal(changed, images) == (name == "unchanged")


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("size", [(8, 8), (15, 13), (64, 64)])
def test_any_size_will_do(name, size):
    images = torch.rand(2, 3, *size)
    assert CHANGES[name](images).shape == images.shape


@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_a_constant_image_stays_as_it_is(name, device):
    images = torch.full((5, 3, 16, 16), 0.3, device=device)
    assert_close(CHANGES[name](images), images, rtol=0, atol=1e-4)  # the weights of grey add up to 0.9999


@pytest.mark.parametrize("name", CHANGES)
def test_images_do_not_mix(name, images):
    """What becomes of an image depends on its place in the batch at most."""
    others = images.clone()
    others[1:] = 0
    assert torch.equal(CHANGES[name](others)[0], CHANGES[name](images)[0])


@pytest.mark.parametrize("name", CHANGES)
def test_the_layout_does_not_matter(name, images):
    """Loaders give channels last."""
    assert_close(CHANGES[name](images.to(memory_format=torch.channels_last)), CHANGES[name](images))


@pytest.mark.parametrize("name", MOVING)
def test_pixels_only_move(name, images):
    changed = CHANGES[name](images)
    assert torch.equal(changed.flatten(2).sort().values, images.flatten(2).sort().values)


def test_unchanged_and_twice_flipped(images):
    assert torch.equal(unchanged(images), images)
    assert torch.equal(flip(images)[..., 0], images[..., -1])
    assert torch.equal(flip(flip(images)), images)


def test_zooms_see_so_much_of_the_side(ramp):
    """On a ramp the steps between pixels of the middle say how far apart in the image they were taken."""
    middle = slice(4, 12)
    for zoomed, step in ((zoom_in(ramp, 3 / 4), 0.75), (zoom_in(ramp, 7 / 8), 0.875), (zoom_out(ramp, 5 / 4), 1.25)):
        steps = zoomed[..., middle, middle].diff(dim=3)
        assert_close(steps.mean(), torch.tensor(step).to(ramp), rtol=0.05, atol=0)
        assert_close(zoomed.mean((2, 3)), ramp.mean((2, 3)), rtol=0.01, atol=0)  # about the same middle
    assert torch.equal(zoom_in(ramp, 1.0), ramp)


def test_zoom_out_reflects(ramp):
    zoomed = zoom_out(ramp, 5 / 4)[0, 0, 8]
    assert zoomed[0] > zoomed[2]  # left of the image it gets brighter again
    assert zoomed[-1] < zoomed[-3]


def test_shifts_take_the_four_directions_in_turn(ramp):
    right, left, down, up = shift(ramp, 1 / 4)[:, 0]
    image = ramp[0, 0]
    assert torch.equal(right[:, 4:], image[:, :-4])
    assert torch.equal(right[:, :4], image[:, 1:5].flip(1))
    assert torch.equal(left[:, :-4], image[:, 4:])
    assert torch.equal(left[:, -4:], image[:, -5:-1].flip(1))
    assert torch.equal(down[4:], image[:-4])
    assert torch.equal(down[:4], image[1:5].flip(0))
    assert torch.equal(up[:-4], image[4:])
    again = shift(ramp[:1].expand(6, -1, -1, -1), 1 / 4)
    assert torch.equal(again[4:], again[:2])


def test_grey_is_the_same_in_all_channels(images):
    changed = grey(images)
    assert torch.equal(changed[:, :1].expand_as(changed), changed)
    assert_close(grey(changed), changed, rtol=0, atol=2e-4)
    assert changed.std() > 0.1


def test_noise_has_its_strength_and_differs_between_images(device):
    added = noise(torch.full((2, 3, 64, 64), 0.5, device=device)) - 0.5
    assert_close(added.std().item(), NOISE, rtol=0.05, atol=0)
    assert abs(added.mean().item()) < 0.002
    assert abs((added[0] * added[1]).mean().item()) < 0.1 * NOISE**2


def test_blur_has_its_width():
    point = torch.zeros(1, 3, 64, 64)
    point[..., 32, 32] = 1
    spread = blur(point)[0, 0]
    assert_close(spread.sum().item(), 1.0, rtol=1e-5, atol=0)
    deviation = (spread.sum(0) * (torch.arange(64) - 32.0).square()).sum().sqrt().item()
    assert_close(deviation, BLUR * 64, rtol=0.02, atol=0)


@pytest.mark.parametrize("parts", [2, 4])
def test_squares_are_shuffled_and_none_stays(parts):
    side = 4
    numbers = torch.arange(parts**2).view(parts, parts).repeat_interleave(side, 0).repeat_interleave(side, 1)
    images = numbers.expand(2, 3, -1, -1).float()
    changed = shuffle(images, parts)
    corners = changed[0, 0, ::side, ::side]
    assert torch.equal(corners.repeat_interleave(side, 0).repeat_interleave(side, 1), changed[0, 0])  # whole squares
    assert not (corners.flatten() == torch.arange(parts**2)).any()


def test_what_the_cut_leaves_stays():
    images = torch.rand(1, 3, 18, 17)
    changed = shuffle(images, 4)
    assert torch.equal(changed[..., 16:, :], images[..., 16:, :])
    assert torch.equal(changed[..., 16:], images[..., 16:])
    assert not torch.equal(changed[..., :16, :16], images[..., :16, :16])
