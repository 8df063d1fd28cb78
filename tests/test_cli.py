"""The command: as a user meets it, in a process of its own; and what it prints, in this one."""

import json
import subprocess
import sys

import pytest
import typer
from result_files import RUN
from typer.testing import CliRunner

from gsanet.cli import app, common, main


def in_a_process(*arguments):
    done = subprocess.run([sys.executable, "-m", "gsanet", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_in_a_process_of_its_own():
    code, out, complaint = in_a_process("models", "gsa_resnet38")
    assert (code, complaint.strip()) == (0, "")
    assert "gsa_resnet38" in out
    code, out, complaint = in_a_process("info", "gsa_resnet5")
    assert (code, out) == (2, "")
    assert "unknown model 'gsa_resnet5': did you mean 'gsa_resnet50'?" in complaint
    assert len(complaint.strip().splitlines()) == 1


def test_help_and_version(command):
    from gsanet import __version__

    shown = command("--help")
    assert "Usage" in shown
    places = [shown.index(f"─ {heading} ─") for heading in ("Look", "Train", "Compare", "Pass on")]
    assert places == sorted(places)
    assert command("--version").strip() == __version__


def commands(group, *words):
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *words, name)


def test_every_command_explains_itself():
    found = list(commands(typer.main.get_command(app)))
    assert ("paper", "run") in found
    for words in found:
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "Usage" in result.output, words


def test_models(command):
    out = command("models", "gsa_resnet38")
    assert "gsa_resnet38" in out
    assert "14.20" in out
    assert json.loads(command("models", "gsa_m*", "--json"))[0]["params"] == 12_825_906


def test_info(command):
    out = command("info", "gsa_resnet50")
    assert "18.053" in out
    assert "7.170" in out
    report = json.loads(command("info", "gsa_resnet50", "--img-size", "160x96", "--num-classes", "10", "--json"))
    assert [stage["shape"] for stage in report["stages"]][1] == [256, 40, 24]
    assert report["params"] == sum(stage["params"] for stage in report["stages"])


def test_paper_structure(command):
    out = command("paper", "structure")
    assert "8 of 9 match" in out
    assert "No reading" in out
    rows = json.loads(command("paper", "structure", "--json"))
    assert sum(row["match"] for row in rows) == 8


def test_paper_tables(command, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    out = command("paper", "table6", "--results", str(tmp_path))
    assert "49.73" in out
    assert "(+1.9) 77.8" in out
    found = json.loads(command("paper", "table2", "--json"))
    assert [row["params_match"] for row in found["rows"]] == [True] * 3
    marks = json.loads(command("paper", "table1", "--json"))
    assert sum(not row["differences"] for row in marks) == 13


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--models", "nothing*"], "no network matches 'nothing*'"),
        (["bench", "--dtype", "float8"], "dtype must be one of float32, bfloat16, float16, got 'float8'"),
        (["bench", "--out", "nowhere/bench.json"], "there is no folder nowhere to write bench.json into"),
        (["bench", "--models", "gsa*26_tiny", "--plot", "plot.png"], "nothing to draw: no accuracy of these networks"),
        (["paper", "table2", "--results", "nowhere"], "no folder of results at nowhere"),
        (["info", "gsa_resnet50", "--img-size", "big"], "image size must be like 224 or 160x96, got 'big'"),
        (["info", "vit_tiny_patch16_224"], "is not a network of this package"),
        (["models", "nothing*"], "no network matches 'nothing*'"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train", "--nope"], "No such option: --nope"),
        (["bench", "--batch", "x"], "Invalid value for '--batch'"),
        (["train", "--model"], "Option '--model' requires an argument"),
        (["info"], "gsanet info --help`)"),
    ],
)
def test_mistakes_are_one_line(command, arguments, words):
    error = command(*arguments, code=2)
    assert words in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [(), ("paper",)])
def test_a_command_without_words_explains_itself(arguments, gsanet):
    code, out, error = gsanet(*arguments)
    assert code == 2
    assert out.count("Usage: ") == 1
    assert not error


@pytest.mark.parametrize("arguments", [
    ("explain", "photograph.jpg", "--at", "1,1", "--out", "x.png"),
    ("export", "gsa_resnet26_tiny", "--out", "x.onnx"),
])  # fmt: skip
def test_what_cannot_be_written_is_said_before_any_work(arguments, tmp_path, monkeypatch, capsys):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr("sys.argv", ["gsanet", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"cannot write {arguments[-1]}: Permission denied" in capsys.readouterr().err
