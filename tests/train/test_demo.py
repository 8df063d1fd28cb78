import json

from typer.testing import CliRunner

from gsanet.cli import app
from gsanet.train.demo import PAIR


def test_the_demo_learns_and_shows_both_networks(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    top1 = {}
    for name in PAIR:
        state = json.loads((tmp_path / name / "last" / "checkpoint.json").read_text())["state"]
        top1[name] = state["evaluation"]["top1"]
        assert f"{top1[name]:.2f}" in result.output
    assert top1["gsa_resnet26_tiny"] > 95
    assert top1["conv_resnet26_tiny"] > 90
    assert (tmp_path / "curves.png").exists()
    assert sorted(file.stem for file in (tmp_path / "scans").iterdir()) == list("0123456789")
    assert "gsanet predict" in result.output
    # The temple of scikit-learn's photograph; CIFAR-100 has no temple.
    assert "castle" in result.output
    assert (tmp_path / "photograph-explain.png").read_bytes().startswith(b"\x89PNG")
