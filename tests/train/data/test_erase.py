"""Random erasing: torchvision's boxes, filled with the mean."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, ks_2samp
from torchvision.transforms import v2

from gsanet.train.data.erase import draw_boxes, erase

COUNT = 4000


@pytest.mark.parametrize("size", [(32, 32), (60, 90), (10, 100), (4, 4)], ids=str)
def test_boxes_are_distributed_as_torchvisions(size):
    """In long images, too, where boxes of some ratios do not fit."""
    ours = draw_boxes(1.0, np.arange(COUNT), size, 1, 2)
    transform, image = v2.RandomErasing(), torch.empty(3, *size)
    params = [transform.make_params([image]) for _ in range(COUNT)]
    theirs = np.array([[each[name] for name in "ijhw"] for each in params if each["v"] is not None])
    drawn = ours[ours[:, 2:].any(1)] if len(theirs) < COUNT else ours
    for column in range(4):
        assert ks_2samp(drawn[:, column], theirs[:, column], method="asymp").pvalue > 1e-3
    assert ks_2samp(drawn[:, 2:].prod(1), theirs[:, 2:].prod(1), method="asymp").pvalue > 1e-3
    assert (ours[:, :2] + ours[:, 2:] <= size).all()


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_boxes_are_as_likely_as_said(probability):
    boxes = draw_boxes(probability, np.arange(COUNT), (32, 32), 0, 0)
    assert binomtest(int(boxes[:, 2].astype(bool).sum()), COUNT, probability).pvalue > 1e-3


def test_boxes_are_the_same_in_every_release():
    boxes = draw_boxes(0.5, np.arange(4), (32, 32), 7, 1)
    assert boxes[:, 2].astype(bool).tolist() == [False, False, False, True]
    assert boxes[3].tolist() == [9, 17, 8, 7]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_box_is_filled_and_nothing_else(device, dtype):
    boxes = draw_boxes(0.7, np.arange(50), (12, 20), 0, 0)
    images = torch.full((50, 3, 12, 20), 200, dtype=dtype)
    erased = erase(images.to(device), torch.from_numpy(boxes).to(device), (1, 2, 3)).cpu()
    for image, (top, left, height, width) in zip(erased, boxes, strict=True):
        expected = torch.full((3, 12, 20), 200, dtype=dtype)
        expected[:, top : top + height, left : left + width] = torch.tensor([1, 2, 3], dtype=dtype).view(3, 1, 1)
        assert torch.equal(image, expected)
