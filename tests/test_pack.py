"""A run as one file of weights that says what it is; and such a file inside the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import gsanet
from gsanet.models.described import read_description
from gsanet.pack import pack
from gsanet.predict import load_classifier

PACKAGE = Path(gsanet.__file__).parent
NAME = "gsa_resnet26_tiny"


@pytest.fixture(scope="module")
def run(digits_run):
    return digits_run / NAME


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory):
    file = tmp_path_factory.mktemp("packed") / f"{NAME}.safetensors"
    pack(run, file, data="digits", license="mit", note="the scans are public")
    return file


def logits(model, size=8):
    torch.manual_seed(1)
    with torch.no_grad():
        return model.eval()(torch.randn(2, 3, size, size))


def test_a_file_says_what_it_is(packed, run):
    found = read_description(packed)
    assert found.model == NAME
    assert found.options == {"depths": [1, 1, 1], "width": 0.25}
    assert found.classes == [str(digit) for digit in range(10)]
    assert (found.license, found.note) == ("mit", "the scans are public")
    assert found.metrics["on"] == "the 360 held-out images of digits"
    assert found.metrics["weights"] == "bf16"
    state = json.loads((run / "last" / "checkpoint.json").read_text())["state"]
    assert found.metrics["top1"] == pytest.approx(state["evaluation"]["top1"], abs=2)
    assert "path" not in found.values["data"]
    tensors = safetensors.torch.load_file(packed)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16, torch.int64}


def test_without_data_the_figures_are_the_runs(run, tmp_path):
    found = pack(run, tmp_path / "a.safetensors")
    state = json.loads((run / "last" / "checkpoint.json").read_text())["state"]
    assert found.metrics["top1"] == state["evaluation"]["top1"]
    assert found.metrics["weights"] == "fp32"


def test_a_file_whose_evaluation_fails_is_not_written(run, packed, tmp_path):
    file = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError):
        pack(run, file, data=str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
    shutil.copy(packed, file)
    with pytest.raises(FileNotFoundError):
        pack(run, file, data=str(tmp_path / "nowhere"))
    assert file.read_bytes() == packed.read_bytes()
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError, match=r"cannot write .*a\.safetensors: No such file"):
        pack(run, tmp_path / "missing" / "a.safetensors", data="digits")


def test_figures_of_weights_that_were_trained_on_since_are_not_theirs(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    figures = {"data": "elsewhere", "top1": 12.5, "top5": 50.0, "loss": 2.0, "images": 8}
    for name in ("best", "last"):
        file = copy / f"eval-{name}.json"
        file.write_text(json.dumps(figures))
        assert pack(copy, tmp_path / "a.safetensors", checkpoint=name).metrics["top1"] == 12.5
        os.utime(file, (1, 1))  # from before the checkpoint was written
        assert pack(copy, tmp_path / "a.safetensors", checkpoint=name).metrics["top1"] != 12.5
    manifest = copy / "last" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    content["state"]["epoch_steps"] = 3
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"eval --run .* --checkpoint last"):
        pack(copy, tmp_path / "a.safetensors")


def test_a_network_from_the_file(packed):
    model = gsanet.create_model(NAME, pretrained=packed)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    tensors = safetensors.torch.load_file(packed)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name
    config = model.pretrained_cfg
    assert config["label_names"] == tuple(str(digit) for digit in range(10))
    assert config["input_size"] == (3, 8, 8)
    assert (config["mean"], config["std"], config["crop_pct"]) == ((0.5,) * 3, (0.5,) * 3, 1.0)
    assert (config["license"], config["interpolation"]) == ("mit", "bilinear")
    notes = dict(note.split(": ", 1) for note in config["notes"])
    assert list(notes) == ["metrics", "recipe", "licence note"]
    assert json.loads(notes["metrics"])["images"] == 360
    assert "lr: 0.1" in notes["recipe"]
    data = timm.data.resolve_model_data_config(model)
    assert (data["input_size"], data["crop_pct"]) == ((3, 8, 8), 1.0)


def test_it_adapts_to_classes_sizes_and_channels(packed):
    model = gsanet.create_model(NAME, pretrained=str(packed))
    other = gsanet.create_model(NAME, pretrained=packed, num_classes=3, img_size=12, in_chans=1)
    torch.manual_seed(1)
    assert other.eval()(torch.randn(2, 1, 12, 12)).shape == (2, 3)
    same = model.state_dict()
    for name, tensor in other.state_dict().items():
        if name.startswith("stages") and "rel_" not in name:
            assert torch.equal(tensor, same[name]), name
    maps = gsanet.create_model(NAME, pretrained=packed, features_only=True).eval()(torch.randn(1, 3, 8, 8))
    assert [tuple(each.shape[2:]) for each in maps] == [(8, 8), (4, 4), (2, 2)]


def test_what_is_saved_for_the_hub_comes_back(packed, tmp_path):
    model = gsanet.create_model(NAME, pretrained=packed)
    gsanet.save_pretrained(model, tmp_path / "folder")
    again = gsanet.create_model(NAME, pretrained=str(tmp_path / "folder"))
    assert torch.equal(logits(model), logits(again))
    assert "/packed" not in (tmp_path / "folder" / "config.json").read_text()
    with pytest.raises(ValueError, match=f"folder holds a {NAME}, not a gsa_resnet50"):
        gsanet.create_model("gsa_resnet50", pretrained=str(tmp_path / "folder"))


def test_bare_weights(packed, tmp_path):
    """As a run leaves them: no word on what they are, but for the number of classes."""
    file = tmp_path / "bare.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(packed), file)
    model = gsanet.create_model(NAME, pretrained=file, depths=(1, 1, 1), width=0.25, img_size=8)
    assert model.num_classes == 10
    assert torch.equal(logits(model), logits(gsanet.create_model(NAME, pretrained=packed)))
    with pytest.raises(ValueError, match=r"do not fit the model: .* there and .* in the model"):
        gsanet.create_model(NAME, pretrained=file)


def test_mistakes(packed, run, tmp_path, command):
    for name, source, words in (
        ("gsa_resnet50", True, "no weights of gsa_resnet50 come with this package"),
        ("gsa_resnet50", packed, f"holds weights of {NAME}, not of gsa_resnet50"),
        (NAME, "nowhere.safetensors", "there is no file of weights nowhere.safetensors"),
        (NAME, str(run), "holds no network: it has no config.json"),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            gsanet.create_model(name, pretrained=source)
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        gsanet.create_model(NAME, pretrained=tmp_path / "broken.safetensors")
    assert "must be named NAME.safetensors" in command("pack", "--run", run, "--out", tmp_path / "a.pt", code=2)
    assert "is no run directory" in command("pack", "--run", tmp_path, "--out", tmp_path / "a.safetensors", code=2)


def test_the_command(run, tmp_path, command):
    said = command("pack", "--run", run, "--out", tmp_path / "a.safetensors", "--checkpoint", "best")
    assert "% top-1 on the 360 held-out images of digits" in said
    assert f'to use it: gsanet.create_model("{NAME}", pretrained=' in said
    figures = command("eval", "--weights", tmp_path / "a.safetensors", "--data", "digits", "--json")
    assert json.loads(figures)["images"] == 360


def test_weights_inside_the_package(run, packed, digit, tmp_path):
    """A copy of the package with a file among its weights, in a fresh process: timm knows it, the commands use it."""
    shutil.copytree(PACKAGE, tmp_path / "gsanet", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    # The registered network has its own shape; the file's options are not needed where they are the network's.
    full = gsanet.create_model(NAME, num_classes=10, img_size=8)
    described = read_description(packed)
    recipe = described.recipe.replace("width: 0.25", "width: 1.0").replace("- 1\n  - 1\n  - 1\n", "- 2\n  - 3\n  - 3\n")
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in full.state_dict().items()
    }
    metadata = {**described.metadata(), "recipe": recipe}
    safetensors.torch.save_file(tensors, tmp_path / "gsanet" / "models" / "weights" / f"{NAME}.safetensors", metadata)
    script = f"""
import json, sys, timm, torch, gsanet
assert gsanet.__file__.startswith({str(tmp_path)!r})
from gsanet.cli import main
assert gsanet.list_models(pretrained=True) == [{NAME!r}]
made = gsanet.create_model({NAME!r}, pretrained=True)
same = timm.create_model({NAME!r}, pretrained=True)
assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), same.state_dict().values()))
assert not torch.equal(made.head.fc.weight, gsanet.create_model({NAME!r}).head.fc.weight)
assert made.pretrained_cfg["label_names"] == tuple("0123456789")
assert timm.create_model({NAME!r}, pretrained=True, num_classes=3, img_size=16).num_classes == 3
for arguments in (
    ["models", {NAME!r}],
    ["predict", {str(digit)!r}, "--model", {NAME!r}],
    ["eval", "--model", {NAME!r}, "--data", "digits"],
):
    sys.argv = ["gsanet", *arguments]
    try:
        main()
    except SystemExit as left:
        assert not left.code, arguments
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "160"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "% top-1 on the 360 held-out images of digits" in done.stdout
    assert "360" in done.stdout
    assert "Also in" not in done.stdout


def test_the_weights_that_ship():
    """Small, complete, and as good as they say: a network of 100 classes that knows a temple when it sees one."""
    name = "gsa_resnet35_tiny"
    file = PACKAGE / "models" / "weights" / f"{name}.safetensors"
    assert file.stat().st_size <= 6_000_000
    found = read_description(file)
    assert (len(found.classes), found.metrics["images"]) == (100, 10_000)
    assert found.metrics["top1"] > 78
    model = timm.create_model(name, pretrained=True)
    assert gsanet.count_parameters(model) <= 3_000_000
    assert model.pretrained_cfg["label_names"] == tuple(found.classes)
    assert model.pretrained_cfg["mean"] == (0.5071, 0.4866, 0.4409)
    (guesses,) = load_classifier().predict([Image.fromarray(load_sample_image("china.jpg"))])
    assert {"castle", "house"} <= {guess.name for guess in guesses}
