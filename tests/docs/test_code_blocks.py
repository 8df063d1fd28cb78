"""What a reader may copy from a page works: Python runs, and a command line is one that the program understands."""

import importlib.util
import re
import shlex

import pytest
import typer.main
from documents import BLOCK, PAGES, ROOT, numbered_blocks

from gsanet.cli import app

PYTHON = numbered_blocks("python")
SHELL = numbered_blocks("bash", "sh")
INLINE = re.compile(r"`gsanet ([^`]+)`")


@pytest.mark.parametrize("name", PYTHON)
def test_python_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(PYTHON[name], name, "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_no_block_escapes(page):
    """Only these languages are checked: `py` or `console` would not be."""
    assert {language for language, _ in BLOCK.findall(PAGES[page].read_text())} <= {"python", "bash", "sh"}


@pytest.mark.parametrize("name", SHELL)
def test_command_lines_are_understood(name, program):
    for line in SHELL[name].replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            check_line(words, program)


def test_command_lines_can_be_wrong(program):
    for line in (
        "gsanet train --recipy x",
        "gsanet explain 3.png",
        "gsanet modells",
        "make coffee",
        "pip install .[x]",
    ):
        with pytest.raises(AssertionError):
            check_line(shlex.split(line), program)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page, program):
    """They may be cut short, as in `gsanet explain`; what is there of them must be right."""
    for text in INLINE.findall(PAGES[page].read_text()):
        command = program
        words = shlex.split(text)
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, text
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, text


@pytest.mark.parametrize("page", PAGES)
def test_scripts_in_the_text_exist(page):
    scripts = re.findall(r"`python ([\w/]+\.py)", PAGES[page].read_text())
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.fixture(scope="module")
def program():
    """The command `gsanet`, which understands its arguments and does nothing."""
    program = typer.main.get_command(app)
    for command in walk(program):
        command.callback = lambda **arguments: None
    return program


def walk(command):
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from walk(each)


def check_line(words, program):
    match words:
        case ["torchrun", *arguments]:
            check_line(arguments[arguments.index("-m") + 1 :], program)
        case ["gsanet", *arguments]:
            with pytest.raises(SystemExit) as left:
                program(arguments)
            assert left.value.code == 0, shlex.join(words)
        case ["python" | "python3", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["python", file, *_]:
            assert (ROOT / file).is_file()
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["pip", "install", what]:
            extras = re.fullmatch(r"(?:gsanet|\.)\[([\w,]+)]", what)[1]
            for extra in extras.split(","):
                assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
        case ["source", ".venv/bin/activate"]:
            pass
        case _:
            raise AssertionError(f"not a command line that is known here: {shlex.join(words)}")
