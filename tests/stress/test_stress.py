"""Accuracies under changes, of networks that were trained for a few seconds on the digits; and the command."""

import json
from dataclasses import replace

import pytest
import torch
from pictures import write_folder, write_shards
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from gsanet.pack import pack
from gsanet.predict import Classifier, Transform
from gsanet.stress import CHANGES, choose_changes, load_any, measure, open_images
from gsanet.stress.measure import BATCH
from gsanet.train.data import DataSettings
from gsanet.train.evaluate_weights import evaluate_weights
from gsanet.train.run_directory import read_run

GSA, CONV = "gsa_resnet26_tiny", "conv_resnet26_tiny"


class Brightness(nn.Module):
    """Says 1 for images that are brighter than 0.5, after their normalisation by 0.5 and 0.25; nan in the dark."""

    num_classes = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        light = x.mean((1, 2, 3)) * self.weight
        return torch.stack([-light, light], 1).where(light[:, None] > -1.9, torch.nan)


@pytest.fixture
def judge():
    settings = DataSettings(img_size=(8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    return Classifier(Brightness(), Transform(settings), (), "judge")


def test_what_is_counted(judge):
    light = torch.tensor([0.9, 0.8, 0.2, 0.0])
    batches = [(light.view(4, 1, 1, 1).expand(4, 3, 8, 8), torch.tensor([1, 0, 0, 0]))] * 3
    changes = {"unchanged": lambda x: x, "black": torch.zeros_like, "inverted": lambda x: 1 - x}
    found = measure(judge, batches, changes)
    assert (found.network, found.images) == ("judge", 12)
    rows = {name: (each.top1, each.kept, each.overflowed) for name, each in found.accuracies.items()}
    assert rows == {"unchanged": (50.0, 1.0, 3), "black": (0.0, 0.0, 12), "inverted": (25.0, 0.5, 0)}
    assert found.standard_error == pytest.approx(100 * (0.5 * 0.5 / 12) ** 0.5)
    black = {"unchanged": torch.zeros_like, "same": lambda x: x}
    assert [each.kept for each in measure(judge, batches, black).accuracies.values()] == [None, None]
    with pytest.raises(ValueError, match="no images to evaluate on"):
        measure(judge, [], changes)


def test_the_network_is_left_as_it_was(judge):
    measure(judge, [(torch.rand(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))], choose_changes())
    assert judge.model.training
    assert judge.model.weight.requires_grad


def test_unchanged_is_what_evaluation_finds(digits_run):
    run = digits_run / GSA
    classifier = load_any(str(run), "cpu")
    found = measure(classifier, open_images(classifier, "digits").val.batches(), choose_changes(["flip", "blur"]))
    evaluation = evaluate_weights(read_run(run), run / "best")
    assert list(found.accuracies) == ["unchanged", "flip", "blur"]
    assert found.images == evaluation.images == 360
    assert found.accuracies["unchanged"].top1 == pytest.approx(evaluation.top1, abs=0.3)  # rounding, at most one image
    assert found.accuracies["flip"].kept < 0.9


def test_images_are_those_of_the_network_in_zero_to_one(tmp_path, judge):
    data = str(write_folder(tmp_path / "folder", val=40))
    judge.model.num_classes = 3
    batches = list(open_images(judge, data).val.batches())
    images = torch.cat([images for images, _ in batches])
    assert [len(labels) for _, labels in batches] == [BATCH, 120 - BATCH]
    assert images.shape == (120, 3, 8, 8)
    assert 0 <= images.min() < 0.2 < 0.8 < images.max() <= 1


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_choice_of_images_is_the_same_for_all(tmp_path, judge, in_memory):
    data = str(write_folder(tmp_path / "folder", val=40))
    judge.model.num_classes = 3

    def images(most, **settings):
        made = replace(judge.transform.settings, in_memory=in_memory, workers=0, **settings)
        opened = open_images(replace(judge, transform=Transform(made)), data, most)
        return torch.cat([images for images, _ in opened.val.batches()])

    chosen, whole = images(50), images(None)
    assert len(chosen) == 50
    places = [(whole == image).flatten(1).all(1).nonzero().item() for image in chosen]
    assert places == sorted(set(places))
    assert places[-1] > 80  # from everywhere, not the first ones
    # A run that held out training images takes the same ones; so do other sizes and means.
    assert torch.equal(images(50, holdout=0.2), chosen)
    larger = images(50, img_size=(16, 16), mean=(0.1,) * 3)
    assert (larger.mean((2, 3)) - chosen.mean((2, 3))).abs().max() < 0.05
    assert torch.equal(images(120), whole)
    assert torch.equal(images(500), whole)


def test_tar_shards_are_taken_whole(tmp_path, judge):
    root = write_shards(tmp_path / "val", (6, 7))
    judge.model.num_classes = 3
    assert sum(len(labels) for _, labels in open_images(judge, f"wds:{root}/*.tar", 13).val.batches()) == 13
    with pytest.raises(ValueError, match="5 of their 13 images cannot be chosen"):
        open_images(judge, f"wds:{root}/*.tar", 5)


def test_the_command(command, digits_run, tmp_path):
    packed = tmp_path / "packed.safetensors"
    pack(digits_run / GSA, packed)
    networks = (packed, digits_run / CONV)
    shown = command("stress", *networks, "--data", "digits", "--images", "100", "--device", "cpu")
    assert "100 held-out images of digits" in shown
    assert all(f"\n{name} " in shown for name in CHANGES)
    assert GSA in shown
    assert CONV in shown
    assert "100%" in shown
    assert "standard error" in shown

    asked = ("--change", "noise", "--change", "zoom-in-3/4", "--device", "cpu", "--json")
    found = json.loads(command("stress", *networks, "--data", "digits", "--images", "0", *asked))
    assert found["data"] == "digits"
    assert [(each["network"], each["weights"]) for each in found["networks"]] == [
        (GSA, str(packed)),
        (CONV, str(digits_run / CONV)),
    ]
    for each in found["networks"]:
        assert each["images"] == 360
        assert [row["change"] for row in each["changes"]] == ["unchanged", "zoom-in-3/4", "noise"]
        base = each["changes"][0]["top1"]
        assert all(row["kept"] == pytest.approx(row["top1"] / base) for row in each["changes"])


def test_two_runs_of_one_network_are_told_apart(command, digits_run, tmp_path):
    packed = tmp_path / "p.safetensors"
    pack(digits_run / CONV, packed)
    asked = ("--data", "digits", "--images", "8", "--change", "flip", "--device", "cpu", "--picture")
    complaint = command("stress", packed, packed, *asked, tmp_path / "nowhere" / "a.png", code=2)
    assert "no folder" in complaint
    picture = tmp_path / "stress.png"
    shown = command("stress", packed, digits_run / CONV, *asked, picture)
    assert f" p.safetensors  {CONV}\n" in shown
    with Image.open(picture) as drawn:
        assert drawn.width > drawn.height > 300
        assert len(drawn.convert("RGB").getcolors(2**20)) > 50


def test_the_network_of_the_package_is_the_default(command, tmp_path):
    complaint = command("stress", "--data", write_folder(tmp_path / "folder"), "--device", "cpu", code=2)
    assert "gsa_resnet35_tiny tells 100 classes apart, but" in complaint
    assert "has 3" in complaint
    named = command("stress", "gsa_resnet35_tiny", "--data", "digits", "--device", "cpu", code=2)
    assert "tells 100 classes apart, but digits has 10" in named


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--change", "zoom-in-3"], "unknown change 'zoom-in-3': did you mean 'zoom-in-3/4'?"),
        (["--change", "xyz"], "unknown change 'xyz': one of unchanged, zoom-in-7/8"),
        (["--device", "tpu"], "device must be cpu or cuda"),
        (
            ["nothing"],
            "nothing is no run directory, no file, and no network whose weights come with this package (gsa_",
        ),
        (["."], "is no run directory"),
        (["--picture", "name"], "says its format"),
    ],
)
def test_what_is_refused(command, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in command("stress", *arguments, "--data", "digits", code=2)


def test_weights_that_do_not_say_what_they_are(command, digits_run, tmp_path):
    pack(digits_run / CONV, tmp_path / "packed.safetensors")
    save_file(load_file(tmp_path / "packed.safetensors"), tmp_path / "bare.safetensors")
    complaint = command("stress", tmp_path / "bare.safetensors", "--data", "digits", code=2)
    assert "does not say which network it belongs to, as files of `gsanet pack` do" in complaint
