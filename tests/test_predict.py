"""Trained networks on a user's images, and the command."""

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from gsanet import predict
from gsanet.export import open_network
from gsanet.images import read_image
from gsanet.predict import Transform, View, load_classifier, predict_images
from gsanet.train.data import DataSettings, open_data
from gsanet.train.recipe import load_recipe
from gsanet.train.run_network import load_run_network
from gsanet.train.weights import read_weights


@pytest.fixture
def run(digits_run):
    return digits_run / "gsa_resnet26_tiny"


def test_images_are_seen_as_in_training(run, digit, tmp_path):
    """The same pixels as the data path's, and so the same accuracy as its evaluation."""
    recipe = load_recipe(str(run / "recipe.yaml"))
    data = open_data("digits", recipe.data_settings, batch_size=64, seed=0, device="cpu", train=False)
    images, labels = next(iter(data.val.batches()))
    classifier = load_classifier(run, device="cpu")
    pixels = ((images * 0.5 + 0.5) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    pictures = [Image.fromarray(np.ascontiguousarray(each)) for each in pixels]
    seen = torch.stack([classifier.transform(picture) for picture in pictures])
    torch.testing.assert_close(seen, images)
    guesses = classifier.predict(pictures, top=3)
    assert np.mean([guess[0].label == label for guess, label in zip(guesses, labels.tolist(), strict=True)]) > 0.8
    assert all(len(guess) == 3 and guess[0].probability >= guess[1].probability for guess in guesses)


def test_weights_with_and_without_what_they_are(run, digit, tmp_path):
    expected = list(predict_images(load_classifier(run, device="cpu"), [digit]))
    tensors, recipe = read_weights(run), (run / "recipe.yaml").read_text()
    names = json.dumps([f"digit {number}" for number in range(10)])
    safetensors.torch.save_file(tensors, tmp_path / "told.safetensors", {"recipe": recipe, "classes": names})
    (found,) = predict_images(load_classifier(weights=tmp_path / "told.safetensors", device="cpu"), [digit])
    assert [guess.probability for guess in found.guesses] == [guess.probability for guess in expected[0].guesses]
    assert found.guesses[0].name == f"digit {found.guesses[0].label}"
    safetensors.torch.save_file(tensors, tmp_path / "bare.safetensors")
    options = {"model_kwargs.depths": [1, 1, 1], "model_kwargs.width": 0.25, "img_size": 8}
    options |= {"data.mean": [0.5] * 3, "data.std": [0.5] * 3}
    bare = load_classifier(None, "gsa_resnet26_tiny", tmp_path / "bare.safetensors", options, "cpu")
    assert list(predict_images(bare, [digit])) == expected
    assert not bare.class_names
    headless = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.fc")}
    safetensors.torch.save_file(headless, tmp_path / "headless.safetensors")
    with pytest.raises(ValueError, match=r"headless\.safetensors do not fit the model: they have no head for classes"):
        load_classifier(None, "gsa_resnet26_tiny", tmp_path / "headless.safetensors", options)
    with pytest.raises(ValueError, match="does not say which network"):
        load_classifier(weights=tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="another image size than img_size says"):
        load_classifier(None, "gsa_resnet26_tiny", tmp_path / "bare.safetensors", {**options, "img_size": 16})
    del options["img_size"]
    with pytest.raises(ValueError, match="say so: --set img_size=64"):
        load_classifier(None, "gsa_resnet26_tiny", tmp_path / "bare.safetensors", options)


def test_a_run_is_opened_alike_by_all(run, digit, tmp_path):
    """With all of its files; before its first evaluation; without the names of its classes."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    expected = load_run_network(run)
    assert expected.class_names == [str(number) for number in range(10)]
    (copied / "classes.json").unlink()
    for found in (load_run_network(copied), load_classifier(copied, device="cpu")):
        assert not found.class_names
        assert found.model.pretrained_cfg == expected.model.pretrained_cfg
        assert found.model.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
        assert torch.equal(found.model.head.fc.weight, expected.model.head.fc.weight)
    source = open_network(run=copied)
    assert source.class_names is None
    for place in copied.glob("best*"):
        shutil.rmtree(place)
    last = read_weights(run / "last")["head.fc.weight"]
    for found in (load_run_network(copied, "last"), load_classifier(copied, device="cpu")):
        assert torch.equal(found.model.head.fc.weight, last)
    with pytest.raises(FileNotFoundError, match="run has no 'best' weights yet"):
        load_run_network(copied)
    for place in copied.glob("last*"):
        shutil.rmtree(place)
    with pytest.raises(FileNotFoundError, match="run has no weights yet"):
        load_classifier(copied)
    with pytest.raises(ValueError, match=f"holds several runs: choose {run.parent / 'conv_resnet26_tiny'} or "):
        load_run_network(run.parent)


def test_the_view_of_an_image():
    transform = Transform(DataSettings(img_size=(32, 32), crop_pct=0.5))
    view = transform.view(Image.new("RGB", (200, 100)))
    assert view == View((100, 200), (64, 128), (16, 48), (32, 32))
    assert view.box == (75, 25, 125, 75)
    assert view.locate(75, 25) == pytest.approx((0.32, 0.32))
    assert view.locate(124, 74) == pytest.approx((31.68, 31.68))
    for place in [(74, 30), (125, 30), (80, 24), (80, 75)]:
        with pytest.raises(ValueError, match="X from 75 to 124 and Y from 25 to 74"):
            view.locate(*place)
    with pytest.raises(ValueError, match="outside of the image: X goes from 0 to 199"):
        view.locate(200, 0)


def test_the_picture_is_that_of_the_box():
    """A black image with a white box where the view says it looks is seen all white."""
    transform = Transform(DataSettings(img_size=(20, 30), crop_pct=0.5, mean=(0.0,) * 3, std=(1.0,) * 3))
    image = Image.new("RGB", (300, 100))
    left, top, right, bottom = map(round, transform.view(image).box)
    image.paste("white", (left - 5, top - 5, right + 5, bottom + 5))
    assert transform(image).min() == 1


def test_the_command(gsanet, run, digit):
    code, out, _ = gsanet("predict", digit, "--run", run, "--top", 2)
    assert code == 0
    assert "three.png" in out
    assert "%" in out
    assert len(out.strip().splitlines()) >= 3
    code, out, _ = gsanet("predict", digit, "--run", run, "--json")
    (found,) = json.loads(out)
    assert code == 0
    assert list(found) == ["image", "top", "note", "error"]
    assert found["top"][0] == {"class": 3, "name": "3", "probability": pytest.approx(0.6, abs=0.4)}
    assert len(found["top"]) == 5


def test_an_image_that_overflows_does_not_take_the_others_with_it(run, digit, tmp_path):
    classifier = load_classifier(run)
    black = tmp_path / "black.png"
    Image.new("L", (8, 8)).save(black)
    darkest = classifier.transform(read_image(black).image).min()

    def overflow(module, inputs, output):
        return torch.where((inputs[0] == darkest).flatten(1).all(1)[:, None], torch.inf, output)

    classifier.model.register_forward_hook(overflow)
    first, second, third = predict_images(classifier, [digit, black, digit])
    assert first.guesses == third.guesses
    assert (first.guesses[0].name, first.error) == ("3", "")
    assert second.guesses == ()
    assert (
        second.error
        == f"{black}: the outputs of {classifier.name} are not finite numbers: train it for longer, or more gently"
    )
    with pytest.raises(ValueError, match="are not finite numbers"):
        classifier.predict([read_image(black).image])


def test_a_folder_with_a_broken_file(gsanet, run, digit, tmp_path):
    for number in range(9):
        shutil.copy(digit, tmp_path / f"{number}.png")
    (tmp_path / "4.png").write_bytes(b"broken")
    (tmp_path / "[odd].png").write_bytes(digit.read_bytes())
    code, out, complaint = gsanet("predict", tmp_path, "--run", run)
    assert code == 0
    assert out.count("█") >= 9
    assert "1 of 10 images could not be classified:" in complaint
    assert "4.png is not an image" in complaint
    code, out, _ = gsanet("predict", tmp_path, "--run", run, "--json")
    assert [bool(each["error"]) for each in json.loads(out)].count(True) == 1
    code, out, complaint = gsanet("predict", tmp_path / "4.png", tmp_path / "none.png", "--run", run)
    assert code == 1
    assert "2 of 2 images could not be classified" in complaint
    assert "there is no file" in complaint


def test_images_of_a_folder_are_told_apart_on_a_narrow_screen(gsanet, run, digit, tmp_path, monkeypatch):
    folder = tmp_path / "a-folder-with-a-rather-long-name"
    folder.mkdir()
    files = [folder / f"{number}.png" for number in range(9)]
    for file in files:
        file.write_bytes(digit.read_bytes())
    monkeypatch.chdir(tmp_path)
    _, out, _ = gsanet("predict", folder.name, "--run", run)
    assert all(f"{folder.name}/{file.name} " in out for file in files)
    _, out, _ = gsanet("predict", folder, "--run", run)
    names = [line.split()[0] for line in out.splitlines() if line.startswith("…")]
    assert [len(name) for name in names] == [40] * 9
    assert [name[-25:] for name in names] == [f"-a-rather-long-name/{file.name}" for file in files]


def test_help(gsanet):
    code, out, _ = gsanet("predict", "--help")
    assert code == 0
    assert "--weights" in out


@pytest.mark.parametrize("command", [("predict",), ("explain", "--at", "4,3", "--stage", "2")])
def test_where_it_computes(gsanet, run, digit, tmp_path, monkeypatch, command):
    asked = []

    def load(*arguments):
        asked.append(arguments[-1])
        return load_classifier(*arguments[:-1], device="cpu")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(predict, "load_classifier", load)
    for option in ([], ["--device", "cpu"]):
        code, _, complaint = gsanet(*command, digit, "--run", run, *option)
        assert code == 0, complaint
    assert asked == [None, "cpu"]


def test_mistakes_are_one_line(gsanet, digits_run, run, digit, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in (
        (["--run", digits_run], "holds several runs: choose"),
        (["--run", tmp_path], "is no run directory"),
        (["--run", "nowhere"], "there is no run directory nowhere"),
        (["--run", run, "--model", "gsa_resnet50"], "not both"),
        (["--model", "gsa_resnet50"], "no weights of gsa_resnet50 come with this package"),
        (["--model", "gsa_resnet35tiny"], "unknown model 'gsa_resnet35tiny': did you mean 'gsa_resnet35_tiny'?"),
        (["--model", "gsa_resnet50"], "`gsanet demo`, then --run runs/quickstart/gsa_resnet26_tiny"),
        (["--weights", "nowhere"], "there is no file of weights nowhere"),
        (["--weights", digit], "is not a safetensors file"),
        (["--run", run, "--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--run", run, "--device", "cuda"], "device is cuda, but there is no GPU here"),
        (["--weights", run / "best" / "model.safetensors", "--model", "gsa_resnet38"], "do not fit the model"),
    ):
        code, _, complaint = gsanet("predict", digit, *arguments)
        assert code == 2
        assert words in complaint
        assert len(complaint.strip().splitlines()) == 1
