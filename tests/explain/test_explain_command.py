"""From a pixel of an image to the picture: the modules that are chosen, and the command."""

import numpy as np
import pytest
from PIL import Image

import gsanet as package
from gsanet.explain import choose_module, explain_image
from gsanet.explain.figure import draw
from gsanet.predict import load_classifier


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def network(**options):
    return package.create_model("gsa_resnet26_tiny", **{"width": 0.125, "img_size": 16, **options})


def test_the_module_that_is_chosen():
    assert choose_module(network(depths=(1, 1, 2)), "net") == "stages.2.1.self_attn"
    assert choose_module(network(depths=(1, 2)), "net") == "stages.1.1.self_attn"
    assert choose_module(network(groups=(1, 2)), "net") == "stages.1.2.self_attn"
    assert choose_module(network(), "net", stage=1) == "stages.0.1.self_attn"
    assert choose_module(network(), "net", stage=2, block=1) == "stages.1.0.self_attn"
    with pytest.raises(ValueError, match="stage 1 of net has no GSA modules; those with some: 2, 3"):
        choose_module(network(groups=(2, 3)), "net", stage=1)
    with pytest.raises(ValueError, match="no GSA module in block 4: it has 1, 2, 3"):
        choose_module(network(), "net", stage=3, block=4)
    with pytest.raises(ValueError, match=r"net has no GSA modules to explain; these networks have: .*gsa_resnet50"):
        choose_module(network(groups=()), "net")


def test_places_of_the_image_are_places_of_the_map(digits_run, digit):
    classifier = load_classifier(digits_run / "gsa_resnet26_tiny", device="cpu")
    image = Image.open(digit).convert("RGB").resize((80, 40))  # the network sees its middle, 40x40
    for at, pixel in {(20, 0): (0, 0), (59, 39): (7, 7), (45, 12): (2, 5)}.items():
        found = explain_image(classifier, image, at, stage=2)
        assert found.explanation.size == (8, 8)
        assert found.explanation.pixel == pixel
        assert found.explanation.error < 1e-10


@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, when there is no room
@pytest.mark.parametrize("options", [{}, {"content": False}, {"row": False}, {"column": False, "row": False}], ids=str)
def test_every_kind_of_module_can_be_drawn(options, tmp_path):
    from gsanet.predict import Classifier, Transform
    from gsanet.train.data import DataSettings

    model = network(num_classes=3, num_heads=1 if options else 16, width=0.25, depths=(1, 1), **options).eval()
    classifier = Classifier(model, Transform(DataSettings(img_size=(16, 16))), ("$a_$", "$b_$", "$c_$"), "net")
    found = explain_image(classifier, Image.effect_noise((30, 70), 80).convert("RGB"), (20, 35))
    for head in (None, 1):
        draw(found, tmp_path / "picture.png", head)
        assert Image.open(tmp_path / "picture.png").width > 1000
    with pytest.raises(ValueError, match="head must be from 1 to"):
        draw(found, tmp_path / "picture.png", 17)


def test_the_command(gsanet, digits_run, digit, tmp_path):
    run = digits_run / "gsa_resnet26_tiny"
    code, out, _ = gsanet("explain", digit, "--at", "4,3", "--run", run, "--stage", 2)
    assert code == 0
    assert "stage 2, block 1" in out
    assert "row 3, column 4 on a map of 8x8" in out
    assert Image.open(tmp_path / "three-explain.png").size[0] > 1000
    arrays = np.load(tmp_path / "three-explain.npz")
    assert arrays["content"].shape == arrays["positional"].shape == (8, 8, 8)
    assert arrays["pixel"].tolist() == [3, 4]
    again = np.einsum("nij,nijv->nv", arrays["content"], arrays["values"])
    again += arrays["scale"] * np.einsum("nij,nijv->nv", arrays["positional"], arrays["values"])
    again += arrays["shift"] * arrays["row"].sum(1)[:, None]
    np.testing.assert_allclose(again, arrays["output"], atol=1e-10)
    files = ["--out", tmp_path / "a.svg", "--npz", tmp_path / "numbers"]
    code, _, _ = gsanet("explain", digit, "--at", "4,3", "--run", run, "--head", 2, *files)
    assert code == 0
    assert (tmp_path / "a.svg").exists()
    assert np.load(tmp_path / "numbers")["size"].tolist() == [4, 4]


def test_help(gsanet):
    code, out, _ = gsanet("explain", "--help")
    assert code == 0
    assert "--at" in out


def test_mistakes_are_one_line(gsanet, digits_run, digit, tmp_path):
    run = ["--run", digits_run / "gsa_resnet26_tiny"]
    for arguments, words in (
        (["--at", "8,0", *run], "8,0 lies outside of the image: X goes from 0 to 7"),
        (["--at", "-1,0", *run], "-1,0 lies outside of the image"),
        (["--at", "middle", *run], "--at takes a pixel as X,Y, such as 120,64, got 'middle'"),
        (["--at", "1,1", "--model", "gsa_resnet50"], "say which network"),
        (["--at", "1,1", "--run", digits_run / "conv_resnet26_tiny"], "conv_resnet26_tiny has no GSA modules"),
        (["--at", "1,1", *run, "--stage", 4], "stage 4 of gsa_resnet26_tiny has no GSA modules"),
        (["--at", "1,1", *run, "--head", 9], "head must be from 1 to 8, got 9"),
        (["--at", "1,1", *run, "--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--at", "1,1", *run, "--out", "nowhere/x.png"], "there is no folder nowhere to write x.png into"),
        (["--at", "1,1", *run, "--out", "three"], "says its format, such as three.png, got three"),
        (["--at", "1,1", *run, "--out", tmp_path], f"{tmp_path} is a folder: give the name of a file"),
    ):
        code, _, complaint = gsanet("explain", digit, *arguments)
        assert code == 2, complaint
        assert words in complaint
        assert len(complaint.strip().splitlines()) == 1
    assert not list(tmp_path.glob("three*"))
    code, _, complaint = gsanet("explain", "none.png", "--at", "1,1", *run)
    assert (code, "there is no file none.png" in complaint) == (2, True)
