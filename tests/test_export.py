import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import gsanet
from gsanet import export as exporting
from gsanet.export import ExportError, check_request, export_model, open_network, sample_photographs
from gsanet.train.engine import train
from gsanet.train.recipe import load_recipe

SMALL = {"img_size": 64, "width": 0.125, "num_classes": 10, "depths": (1, 1, 1, 1)}
NETWORKS = {
    "gsa_resnet26": SMALL,
    "conv_resnet26": SMALL,
    "gsa_resnet26_tiny": {"width": 0.125, "depths": (1, 1)},
    "gsa_m_resnet50": {**SMALL, "width": 0.25},
    "axial_resnet50": SMALL,
}
TINY = {"width": 0.125, "depths": (1, 1)}

# Reads and runs an archive where importing gsanet is an error.
ALONE = """
import json, sys
sys.modules["gsanet"] = None
import torch
file, out = sys.argv[1:]
extra = {"gsanet.json": ""}
program = torch.export.load(file, extra_files=extra)
settings = json.loads(extra["gsanet.json"])
run = program.module()
torch.save([run(torch.linspace(-1, 1, n * 3072).view(n, *settings["input_size"])) for n in (1, 5)], out)
print(settings["model"], settings["class_names"])
"""


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return gsanet.create_model("gsa_resnet26_tiny", **TINY).eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_computes_the_same(name, tmp_path):
    pytest.importorskip("onnxruntime")
    model = gsanet.create_model(name, **NETWORKS[name])
    found = export_model(model, tmp_path / "net.onnx")
    assert found.difference < 1e-5
    assert found.size == (tmp_path / "net.onnx").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]  # weights are inside


def test_onnx_says_what_it_takes(tiny, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    export_model(tiny, tmp_path / "net.onnx", opset=20, fuse=False, class_names=[str(n) for n in range(100)])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("images", ["batch", 3, 32, 32])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("logits", ["batch", 100])]
    found = session.get_modelmeta().custom_metadata_map
    assert json.loads(found["mean"]) == [0.5071, 0.4866, 0.4409]
    assert json.loads(found["class_names"])[99] == "99"
    assert found["model"] == "gsa_resnet26_tiny"


@pytest.mark.parametrize("size", [(48, 40), (24, 16)], ids=["stretched tables", "middle of the tables"])
def test_other_image_sizes(tiny, tmp_path, size):
    found = export_model(tiny, tmp_path / "net.pt2", "exported", img_size=size)
    assert f"[batch, 3, {size[0]}, {size[1]}]" in found.inputs
    images = torch.randn(2, 3, *size)
    run = torch.export.load(tmp_path / "net.pt2").module()
    assert tiny.img_size == (32, 32)  # the network itself stays
    fitted = gsanet.create_model("gsa_resnet26_tiny", **TINY).eval()
    fitted.load_state_dict(tiny.state_dict())
    fitted.set_input_size(size)
    with torch.no_grad():
        torch.testing.assert_close(run(images), fitted(images), atol=1e-4, rtol=1e-4)
    with pytest.raises(Exception, match=r"(?i)shape|expected|guard"):
        run(torch.randn(2, 3, 32, 32))  # one file, one size


def test_archive_runs_without_this_package(tiny, tmp_path):
    export_model(tiny, tmp_path / "net.pt2", "exported")
    command = [sys.executable, "-I", "-c", ALONE, str(tmp_path / "net.pt2"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "gsa_resnet26_tiny None"
    for found, batch in zip(torch.load(tmp_path / "out.pt"), (1, 5), strict=True):
        with torch.no_grad():
            expected = tiny(torch.linspace(-1, 1, batch * 3072).view(batch, 3, 32, 32))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_plain_backend_is_what_is_traced(tiny):
    from gsanet.functional import use_backend

    images = sample_photographs((32, 32), 3, (0.5,) * 3, (0.5,) * 3)
    with use_backend("fused"):  # whatever was preferred before
        program = exporting._trace(tiny.requires_grad_(False), images)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets
    assert all(target.startswith(("aten.", "<built-in", "sym_", "torch.")) for target in targets), targets


def test_a_file_that_differs_is_not_kept(tiny, tmp_path, monkeypatch):
    file = tmp_path / "net.pt2"
    file.write_text("an earlier file")
    opened = exporting._open_exported
    monkeypatch.setattr(exporting, "_open_exported", lambda path: lambda x: opened(path)(x) * 1.01)
    with pytest.raises(ExportError, match=r"differs from PyTorch by 1\.0e-02 of the largest logit"):
        export_model(tiny, file, "exported")
    assert [each.name for each in tmp_path.iterdir()] == ["net.pt2"]
    assert file.read_text() == "an earlier file"


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"ONNX needs onnx, onnxruntime, onnxscript: pip install 'gsanet\[onnx\]'"):
        check_request(tmp_path / "net.onnx", "onnx")
    assert check_request(tmp_path / "net.pt2", "exported") == "exported"


def test_weights_bring_their_number_of_classes(tmp_path):
    trained = gsanet.create_model("gsa_resnet26_tiny", num_classes=7, **TINY)
    save_file(trained.state_dict(), tmp_path / "net.safetensors")
    source = open_network("gsa_resnet26_tiny", tmp_path / "net.safetensors", options=TINY)
    assert source.model.num_classes == 7
    assert torch.equal(source.model.head.fc.weight, trained.head.fc.weight)


def test_a_run_brings_its_classes_and_preprocessing(tmp_path, command):
    overrides = {"model_kwargs.width": 0.125, "model_kwargs.depths": [1, 1], "batch_size": 64, "steps": 2}
    train(load_recipe("quickstart", overrides), tmp_path / "run")
    out = tmp_path / "net.pt2"
    text = command("export", "--run", str(tmp_path / "run"), "--format", "exported", "--out", str(out))
    assert "images: float32 [batch, 3, 8, 8]" in text
    extra = {"gsanet.json": ""}
    torch.export.load(out, extra_files=extra)
    settings = json.loads(extra["gsanet.json"])
    assert settings["class_names"] == [str(digit) for digit in range(10)]
    assert settings["mean"] == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="trained gsa_resnet26_tiny, not gsa_resnet50"):
        open_network("gsa_resnet50", run=tmp_path / "run")


def test_command(tmp_path, command):
    pytest.importorskip("onnxruntime")
    assert "Usage" in command("export", "--help")
    out = tmp_path / "net.onnx"
    options = ("--set", "width=0.125", "--set", "depths=[1,1]", "--img-size", "40x24", "--no-fuse")
    text = command("export", "gsa_resnet26_tiny", "--out", str(out), *options)
    assert f"written: {out}" in text
    assert "images: float32 [batch, 3, 40, 24]" in text
    assert "of the largest logit" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gsa_resnet5", "--out", "net.onnx"], "unknown model 'gsa_resnet5': did you mean 'gsa_resnet50'?"),
        (["gsa_resnet50", "--out", "nowhere/net.onnx"], "there is no folder nowhere to write net.onnx into"),
        (["--out", "net.onnx"], "give the name of a network, or --run DIR"),
        (["gsa_resnet50", "--out", "net.pt2"], "a file of format onnx ends in .onnx, got net.pt2"),
        (["gsa_resnet50", "--out", "net.onnx", "--opset", "11"], "opset must be 18 or later, got 11"),
        (["gsa_resnet50", "--out", "net.onnx", "--weights", "net.bin"], "there are no weights at net.bin"),
    ],
)
def test_mistakes_are_one_line(arguments, words, tmp_path, monkeypatch, command):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    error = command("export", *arguments, code=2)
    assert words in error
    assert len(error.strip().splitlines()) == 1
