import json
import os
import shutil
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file

import gsanet
from gsanet.hub import check_repository, publish
from gsanet.train.engine import train
from gsanet.train.recipe import load_recipe

TINY = {"width": 0.125, "depths": (1, 1)}
CASES = {
    "options": ("gsa_resnet50", {"groups": (2, 3), "stem": "3x3/1", "img_size": (24, 16), "num_classes": 3,
                                 "width": 0.125, "depths": (1, 1, 1), "reach": 5, "drop_path_rate": 0.1}),
    "numpy's numbers": ("gsa_resnet26_tiny", {"depths": np.ones(2, int), "img_size": (np.int64(24), 16),
                                              "num_classes": np.int64(3), "reach": np.int64(5)}),
    "channels": ("gsa_resnet26_tiny", {**TINY, "in_chans": 4}),
    "one channel": ("gsa_resnet26_tiny", {**TINY, "in_chans": 1}),
    "twin": ("conv_resnet26_tiny", TINY),
    "inserted": ("nonlocal_resnet50", {"depths": (1, 1, 1, 1), "width": 0.125, "img_size": 32, "after": {}}),
    "timm's": ("resnet10t", {"num_classes": 5}),
}  # fmt: skip


def outputs(model, size):
    torch.manual_seed(1)
    with torch.no_grad():
        return model.eval()(torch.randn(2, *size))


@pytest.mark.parametrize("case", CASES)
def test_comes_back_identical(case, tmp_path):
    name, options = CASES[case]
    model = gsanet.create_model(name, **options).eval()
    gsanet.save_pretrained(model, tmp_path, license="mit")
    size = (
        options.get("in_chans", 3),
        *(model.img_size if hasattr(model, "img_size") and model.img_size else (32, 32)),
    )
    expected = outputs(model, size)
    for made in (
        gsanet.from_pretrained(tmp_path),
        gsanet.create_model(f"local-dir:{tmp_path}", pretrained=True),
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True),
    ):
        assert torch.equal(outputs(made, size), expected)
        assert made.state_dict().keys() == model.state_dict().keys()
        assert getattr(made, "settings", None) == getattr(model, "settings", None)
        assert made.pretrained_cfg["license"] == "mit"


def test_the_folder_is_timms(tmp_path):
    model = gsanet.create_model("gsa_resnet26_tiny", num_classes=2, img_size=16, groups=(2, 3))
    gsanet.save_pretrained(model, tmp_path, class_names=["cat", "dog"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "gsa_resnet26_tiny"
    # timm adds what it knows itself from version 1.0.31 on.
    known = {"num_classes": 2, "in_chans": 3, "global_pool": "avg"}
    own = {"groups": [2, 3], "img_size": [16, 16]}
    assert config["model_args"] in (own, known | own)
    assert config["num_classes"] == 2
    assert config["label_names"] == ["cat", "dog"]
    assert config["pretrained_cfg"]["input_size"] == [3, 16, 16]
    assert config["pretrained_cfg"]["mean"] == [0.5071, 0.4866, 0.4409]
    assert config["pretrained_cfg"]["license"] == "apache-2.0"
    card = (tmp_path / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "gsanet.from_pretrained(" in card
    made = gsanet.from_pretrained(tmp_path)
    assert tuple(timm.data.resolve_model_data_config(made)["input_size"]) == (3, 16, 16)
    assert made.pretrained_cfg["label_names"] == ["cat", "dog"]


def test_what_timm_writes_itself_is_read(tmp_path):
    model = gsanet.create_model("gsa_resnet26_tiny", num_classes=4, **TINY).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=TINY, safe_serialization=True)
    assert torch.equal(outputs(gsanet.from_pretrained(tmp_path), (3, 32, 32)), outputs(model, (3, 32, 32)))


def test_stored_networks_take_other_heads_and_sizes(tmp_path):
    model = gsanet.create_model("gsa_resnet26_tiny", **TINY)
    model.set_input_size(24)  # after it was made
    gsanet.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["img_size"] == [24, 24]
    assert gsanet.from_pretrained(tmp_path).img_size == (24, 24)
    other = gsanet.from_pretrained(tmp_path, num_classes=7, img_size=48)
    assert outputs(other, (3, 48, 48)).shape == (2, 7)
    assert torch.equal(other.stages[0][0].conv1_1x1.conv.weight, model.stages[0][0].conv1_1x1.conv.weight)
    maps = gsanet.from_pretrained(tmp_path, features_only=True)(torch.randn(1, 3, 24, 24))
    assert [tuple(each.shape[-2:]) for each in maps] == [(24, 24), (12, 12)]


def test_refusals(tmp_path):
    model = gsanet.create_model("gsa_resnet26_tiny", **TINY)
    with pytest.raises(ValueError, match="2 class names for a network of 100 classes"):
        gsanet.save_pretrained(model, tmp_path, class_names=["cat", "dog"])
    with pytest.raises(ValueError, match="not one that was fused or changed"):
        gsanet.save_pretrained(gsanet.fuse_for_inference(model), tmp_path)
    with pytest.raises(TypeError, match="Linear was not made by create_model"):
        gsanet.save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(TypeError, match=r"norm_layer=.* cannot be stored"):
        gsanet.save_pretrained(
            gsanet.create_model("gsa_resnet26_tiny", norm_layer=torch.nn.BatchNorm2d, **TINY), tmp_path
        )
    with pytest.raises(FileNotFoundError, match=r"holds no network: it has no config\.json"):
        gsanet.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no USER/NAME of the Hub either"):
        gsanet.from_pretrained(tmp_path / "nothing")
    with mock.patch("huggingface_hub.hf_hub_download", side_effect=AssertionError("the Hub was asked")):
        for source in ("nothing", "nothing@main"):
            with pytest.raises(FileNotFoundError, match="is no USER/NAME of the Hub either"):
                gsanet.from_pretrained(source)
    for repo in ("name", "user/", "a/b/c", "user/na me"):
        with pytest.raises(ValueError, match="a repository is named USER/NAME"):
            check_repository(repo)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "run"
    overrides = {"model_kwargs.width": 0.125, "model_kwargs.depths": [1, 1], "batch_size": 64, "steps": 2}
    train(load_recipe("quickstart", overrides), out)
    return out


class FakeHub:
    """What `publish` asks of the Hub, without a network: files are only read."""

    def __init__(self, **kwargs):
        self.calls = []

    def whoami(self):
        return {"name": "user"}

    def create_repo(self, repo, exist_ok):
        self.repo = repo

    def upload_folder(self, repo_id, folder_path, commit_message):
        assert repo_id == self.repo
        names = sorted(file.name for file in folder_path.iterdir())
        assert names == ["README.md", "config.json", "model.safetensors"]
        return f"https://huggingface.co/{repo_id}"


def test_publish(run, tmp_path, command, monkeypatch):
    assert "Usage" in command("publish", "--help")
    text = command("publish", "--run", str(run), "--repo", "user/digits", "--folder", str(tmp_path / "digits"))
    assert f"written: {tmp_path / 'digits'}" in text
    made = gsanet.from_pretrained(tmp_path / "digits")
    stored = load_file(next((run / "best").rglob("model.safetensors")))
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert made.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]
    assert made.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    assert made.img_size == (8, 8)
    assert 'gsanet.from_pretrained("user/digits")' in (tmp_path / "digits" / "README.md").read_text()
    assert "is not empty" in command(
        "publish", "--run", str(run), "--repo", "user/digits", "--folder", str(tmp_path / "digits"), code=2
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    assert "published: https://huggingface.co/user/digits" in command(
        "publish", "--run", str(run), "--repo", "user/digits"
    )


def test_a_folder_that_cannot_be_made_is_said_before_any_work(run, tmp_path, command):
    (tmp_path / "file").touch()
    printed = command("publish", "--run", str(run), "--repo", "user/name", "--folder", f"{tmp_path}/file/new", code=2)
    assert printed.strip() == f"error: cannot make the folder {tmp_path}/file/new: Not a directory"
    with pytest.raises(OSError, match=r"cannot make the folder .*: File exists"):
        gsanet.save_pretrained(gsanet.create_model("gsa_resnet26_tiny", img_size=8), tmp_path / "file")


def test_the_card_says_what_the_accuracy_was_measured_on(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("path: digits", "path: /home/me/digits"))
    figures = {"data": "elsewhere", "top1": 12.5, "top5": 50.0, "loss": 2.0, "images": 8}
    (copy / "eval-best.json").write_text(json.dumps(figures))
    publish(copy, "user/digits", tmp_path / "new")
    card = (tmp_path / "new" / "README.md").read_text()
    assert "the 8 held-out images of elsewhere" in card
    assert "- **Data:** digits\n" in card
    (copy / "eval-best.json").write_text(json.dumps({**figures, "holdout": 0.1}))
    publish(copy, "user/digits", tmp_path / "part")
    assert "the 8 training images, held out, of elsewhere" in (tmp_path / "part" / "README.md").read_text()
    os.utime(copy / "eval-best.json", (1, 1))  # from before the weights were written
    publish(copy, "user/digits", tmp_path / "old")
    assert "12.5" not in (tmp_path / "old" / "README.md").read_text()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalTokenNotFoundError("no token"), "not logged in to the Hub: run `hf auth login` or set HF_TOKEN"),
        (ConnectionError("no route"), "the Hub cannot be used: no route; --folder DIR writes the files only"),
    ],
)
def test_publish_without_the_hub_is_one_line(error, words, run, command, monkeypatch):
    def fail(self):
        raise error

    monkeypatch.setattr(FakeHub, "whoami", fail)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    printed = command("publish", "--run", str(run), "--repo", "user/digits", code=2)
    assert words in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "nowhere", "--repo", "user/name", "--folder", "out"], "nowhere is no run directory"),
        (["--run", "nowhere", "--repo", "user/name"], "nowhere is no run directory"),
        (["--run", "nowhere", "--repo", "name"], "a repository is named USER/NAME, got 'name'"),
    ],
)
def test_mistakes(arguments, words, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in command("publish", *arguments, code=2)
    assert not (tmp_path / "out").exists()
