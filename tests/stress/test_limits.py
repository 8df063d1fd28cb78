"""What a network's arithmetic bears: cases that are counted by hand on small networks, and the command."""

import json

import pytest
import torch
from torch import nn

from gsanet.predict import Classifier, Transform
from gsanet.stress import load_any, measure_limits, mix, open_images
from gsanet.stress.limits import FACTORS, NOISES, patterns
from gsanet.train.data import DataSettings

GSA, CONV = "gsa_resnet26_tiny", "conv_resnet26_tiny"
CASES = ["as evaluated", "statistics of the batch", "bfloat16", *(f"inputs x {factor:g}" for factor in FACTORS)]
PATTERNS = ["plain colours", "stripes", "checkerboards", "noise"]


class Tower(nn.Module):
    """Its logits are the normalised means of two channels, after a batch norm; from 5 on they overflow."""

    num_classes = 2

    def __init__(self, mean=0.0):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.norm.running_mean.fill_(mean)

    def forward(self, x):
        logits = self.norm(x).mean((2, 3))[:, :2]
        return logits.where(logits.abs() < 5, torch.inf)


def judge(model):
    settings = DataSettings(img_size=(8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    return Classifier(model, Transform(settings), (), "judge")


def bytes_of(first, second):
    """Plain images whose first two channels have these values, from 0 to 255, and which of them is larger."""
    channels = torch.tensor([first, second, first], dtype=torch.uint8).T
    return channels[:, :, None, None].expand(-1, -1, 8, 8), (channels[:, 1] > channels[:, 0]).long()


def test_what_is_counted():
    batch = bytes_of([51, 255, 128, 128], [255, 0, 153, 255])  # normalised: -1.2 and 2; 2 and -2; 0 and 0.4; 0 and 2
    found = measure_limits(judge(Tower()), [batch] * 2)
    assert found.network == "judge"
    assert list(found.cases) == [*CASES, *PATTERNS]
    evaluated = found.cases["as evaluated"]
    assert (evaluated.images, evaluated.top1, evaluated.overflowed) == (8, 100.0, 0)
    assert evaluated.largest == pytest.approx(2, rel=1e-3)
    rows = {factor: found.cases[f"inputs x {factor}"] for factor in (2, 3, 4, 8)}
    assert {factor: (row.top1, row.overflowed) for factor, row in rows.items()} == {
        2: (100.0, 0), 3: (25.0, 6), 4: (25.0, 6), 8: (25.0, 6),
    }  # fmt: skip
    assert rows[8].largest == pytest.approx(8 * 0.4, rel=1e-3)
    colours = found.cases["plain colours"]
    assert (colours.images, colours.top1, colours.overflowed) == (8, None, 0)
    assert colours.largest == pytest.approx(2, rel=1e-3)


def test_statistics_of_the_batch_are_the_batchs():
    # Running means that are wrong by far do not matter to it, and are left as they are.
    model = Tower(mean=5.0)
    batch = bytes_of([0, 255] * 4, [255, 0] * 4)
    found = measure_limits(judge(model), [batch])
    assert found.cases["as evaluated"].overflowed == 8
    assert found.cases["as evaluated"].largest is None
    assert found.cases["statistics of the batch"].top1 == 100.0
    assert found.cases["statistics of the batch"].largest == pytest.approx(1, rel=1e-3)
    assert model.norm.running_mean.tolist() == [5.0] * 3
    assert model.training


def test_bfloat16_rounds():
    class Linear(nn.Linear):
        num_classes = 2

        def forward(self, x):
            return super().forward(x.flatten(1))

    model = Linear(3 * 8 * 8, 2)
    batch = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.zeros(16, dtype=torch.int64)
    cases = measure_limits(judge(model), [batch]).cases
    exact, rounded = cases["as evaluated"].largest, cases["bfloat16"].largest
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_mixed_images_are_the_same_images():
    images = torch.arange(200).div(255).view(200, 1, 1, 1).expand(-1, 3, 8, 8)
    labels = torch.arange(200)
    mixed = mix(zip(images.split(64), labels.split(64), strict=True))
    assert [len(each) for _, each in mixed] == [50, 50, 50, 50]
    assert all(torch.equal(pixels[:, 0, 0, 0].long(), numbers) for pixels, numbers in mixed)
    order = torch.cat([numbers for _, numbers in mixed])
    assert order.sort().values.tolist() == list(range(200))
    # Each batch holds images from everywhere, where the first of them held the first third.
    assert order[:64].max() > 150
    assert torch.equal(order, torch.cat([numbers for _, numbers in mix([(images, labels)])]))
    with pytest.raises(ValueError, match="no images to evaluate on"):
        mix([])


def test_patterns():
    made = patterns((8, 16))
    assert {name: tuple(images.shape) for name, images in made.items()} == {
        "plain colours": (8, 3, 8, 16),
        "stripes": (6, 3, 8, 16),
        "checkerboards": (3, 3, 8, 16),
        "noise": (NOISES, 3, 8, 16),
    }
    for name, images in made.items():
        assert set(images.unique().tolist()) == {0.0, 1.0}, name
        assert len(images.flatten(1).unique(dim=0)) == len(images), name
    assert made["stripes"][0, 0, :, 0].tolist() == [0, 1] * 4
    assert made["checkerboards"][1, 0, :4, 0].tolist() == [0, 0, 1, 1]


def test_a_trained_network(digits_run):
    classifier = load_any(str(digits_run / GSA), "cpu")
    cases = measure_limits(classifier, mix(open_images(classifier, "digits").val.batches())).cases
    evaluated, batch = cases["as evaluated"], cases["statistics of the batch"]
    assert evaluated.images == 360
    assert evaluated.top1 > 60
    assert evaluated.top1 != batch.top1
    assert evaluated.largest != batch.largest  # its GSA modules' own norms take part, too
    assert cases["inputs x 8"].top1 < evaluated.top1


def test_the_command(command, digits_run):
    networks = (digits_run / GSA, digits_run / CONV)
    asked = ("limits", *networks, "--data", "digits", "--images", "64", "--device", "cpu")
    shown = command(*asked)
    assert f"{GSA}, digits" in shown
    assert f"{CONV}, digits" in shown
    assert all(shown.count(f"\n{name} ") == 2 for name in (*CASES, *PATTERNS))
    found = json.loads(command(*asked, "--json"))
    assert [each["network"] for each in found["networks"]] == [GSA, CONV]
    for each in found["networks"]:
        assert [row["case"] for row in each["cases"]] == [*CASES, *PATTERNS]
        assert each["cases"][0].keys() == {"case", "images", "top1", "largest", "overflowed"}
        assert each["cases"][0]["images"] == 64
