"""TrivialAugment: torchvision's operations, for a whole batch at once."""

import numpy as np
import pytest
import torch
from pictures import picture
from scipy.stats import binomtest, chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from gsanet.train.data import draws
from gsanet.train.data.policy import LEVELS, OPERATIONS, choose_operations, draw_operations, operate

SPACE = v2.TrivialAugmentWide._AUGMENTATION_SPACE
NAMES = {name: next(theirs for theirs in SPACE if theirs.lower() == name.replace("_", "")) for name in OPERATIONS}
# Torchvision cuts off where these round, and blends with a grey that it has cut off before.
TOLERANCE = dict.fromkeys(NAMES, 1) | {"color": 2, "contrast": 2, "identity": 0, "posterize": 0, "equalize": 0}


def pixels(number, size):
    return v2.functional.pil_to_tensor(picture(number, size))


def magnitude(space, level):
    """Torchvision's, in double precision: its own, in single, cuts 16 pixels to 15."""
    if space is None:
        return 0.0
    if not space.is_floating_point():
        return int(space[level])
    least, most = space[0].item(), space[-1].item()
    return (least * (LEVELS - 1 - level) + most * level) / (LEVELS - 1)


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (2, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_torchvisions(name, size):
    """Each at every strength, in both directions."""
    theirs = v2.TrivialAugmentWide(LEVELS, interpolation=v2.InterpolationMode.BILINEAR)
    space, signed = SPACE[NAMES[name]]
    space = space(LEVELS, *size)
    image = pixels(2, size)
    cases = [(level, sign) for level in range(LEVELS) for sign in ((1, -1) if signed else (1,))]
    level, sign = np.array(cases).T
    operations = choose_operations(np.full(len(cases), OPERATIONS.index(name)), level, sign, size)
    ours = operate(image.float().expand(len(cases), -1, -1, -1), operations)
    options = {"interpolation": theirs.interpolation, "fill": theirs._fill}
    for one, (of_level, of_sign) in zip(ours, cases, strict=True):
        strength = of_sign * magnitude(space, of_level)
        other = theirs._apply_image_or_video_transform(image, NAMES[name], strength, **options)
        assert (one - other).abs().max() <= TOLERANCE[name], (of_level, of_sign)


def test_they_are_all_of_torchvisions():
    assert sorted(NAMES.values()) == sorted(SPACE)


@pytest.mark.parametrize("value", [0, 100, 255])
def test_an_image_of_one_value_stays_in_range(value):
    """Nothing to stretch, nothing to equalize, and no division by it."""
    every = np.arange(len(OPERATIONS))
    for level in (0, LEVELS - 1):
        operations = choose_operations(every, np.full_like(every, level), np.ones_like(every), (8, 8))
        changed = operate(torch.full((len(every), 3, 8, 8), float(value)), operations)
        assert torch.equal(changed, changed.round().clamp(0, 255))
        for name in ("identity", "autocontrast", "equalize", "sharpness"):
            assert (changed[OPERATIONS.index(name)] == value).all()


def test_operations_and_strengths_are_as_likely_as_said():
    count = 20_000
    samples = np.arange(count)
    operation, level = draws.uniforms(3, 5, draws.POLICY, samples, 2).T * np.array([[len(OPERATIONS)], [LEVELS]])
    table = np.histogram2d(operation, level, (range(len(OPERATIONS) + 1), range(LEVELS + 1)))[0]
    assert chisquare(table.ravel()).pvalue > 1e-3
    operations = draw_operations(samples, (8, 8), 3, 5)
    assert list(operations.counts) == table.sum(1).tolist()
    assert sorted(operations.rows.tolist()) == samples.tolist()
    begin = sum(operations.counts[: OPERATIONS.index("brightness")])
    strength = operations.values[begin : begin + operations.counts[OPERATIONS.index("brightness")], 6]
    brighter, darker = int((strength > 1).sum()), int((strength < 1).sum())
    assert binomtest(brighter, brighter + darker, 0.5).pvalue > 1e-3
    assert strength.min() == pytest.approx(0.01)
    assert strength.max() == pytest.approx(1.99)


def test_draws_are_the_same_in_every_release():
    """A run that a later release resumes must see the same images."""
    counts, rows, values = draw_operations(np.arange(6), (32, 32), 7, 1)
    names = [name for name, count in zip(OPERATIONS, counts, strict=True) for _ in range(count)]
    drawn = sorted(zip(rows.tolist(), names, strict=True))
    assert [name for _, name in drawn] == ["rotate", "brightness", "posterize", "autocontrast", "solarize", "rotate"]
    strengths = dict(zip(rows.tolist(), values[:, 6].tolist(), strict=True))
    assert [strengths[row] for row in (1, 2, 4)] == pytest.approx([1.627, 16, 93.5])


def test_a_sample_is_changed_alone_as_in_any_batch():
    """To the last bit, whatever else the batch holds and in whatever order."""
    size, samples = (24, 20), np.random.default_rng(0).permutation(200)
    images = torch.stack([pixels(number, size) for number in samples]).float()
    together = operate(images, draw_operations(samples, size, 1, 2))
    assert not torch.equal(together, images)
    for sample, image, expected in zip(samples, images, together, strict=True):
        alone = operate(image[None], draw_operations(np.array([sample]), size, 1, 2))
        assert torch.equal(alone[0], expected)


class Launches(TorchDispatchMode):
    """Counts what would be kernels on a GPU, and refuses what would wait for one."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
    NO_KERNEL = ("view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "unbind", "unsqueeze")
    NO_KERNEL += ("unsqueeze_", "expand", "permute", "empty", "empty_like")

    def __init__(self):
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.WAITS
        if name in ("index", "index_put", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1])
        self.kernels += name not in self.NO_KERNEL
        return function(*args, **(kwargs or {}))


def test_a_batch_takes_few_kernels_and_waits_for_none():
    images, operations = torch.zeros(512, 3, 8, 8), draw_operations(np.arange(512), (8, 8), 0, 0)
    assert min(operations.counts) > 0
    with Launches() as launches:
        operate(images, operations)
    assert 20 < launches.kernels < 70


def test_every_device_shows_the_same(device):
    size, samples = (32, 32), np.arange(100)
    images = torch.stack([pixels(number, size) for number in samples]).float()
    operations = draw_operations(samples, size, 0, 0)
    there = operations._replace(rows=operations.rows.to(device), values=operations.values.to(device))
    changed = operate(images.to(device), there).cpu()
    assert (changed - operate(images, operations)).abs().max() <= 1
