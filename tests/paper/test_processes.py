"""One program in several processes: their output, their exit codes, and a signal for all of them."""

import os
import signal

from gsanet.paper.processes import run_processes
from gsanet.paper.run_matrix import run_command

PROGRAM = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
print("ready")
if "die" in sys.argv:
    signal.raise_signal(signal.SIGKILL)
while "wait" in sys.argv and not asked:
    time.sleep(0.01)
print("saved", *sys.argv[1:], file=sys.stderr)
sys.exit(3 if "fail" in sys.argv else 0)
"""


def test_output_and_exit_code(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = []
    assert run_processes(2, "program", ["one"], said.append) == 0
    assert sorted(said) == ["[1] ready", "[1] saved one", "[2] ready", "[2] saved one"]
    assert run_processes(1, "program", ["fail"], said.append) == 3
    assert run_processes(1, "program", ["die"], said.append) == 128 + signal.SIGKILL
    assert said[-1] == "[1] ended by SIGKILL"


def test_a_signal_is_passed_on(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = []

    def say(line):
        said.append(line)
        if sorted(said) == ["[1] ready", "[2] ready"]:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert run_processes(2, "program", ["wait"], say) == 0
    assert sorted(said)[1::2] == ["[1] saved wait", "[2] saved wait"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_matrix_in_processes(tmp_path):
    said = []
    places = {"work": tmp_path / "work", "results": tmp_path, "data": [f"tinyimagenet={tmp_path / 'nothing'}"]}
    code = run_command(["choice-gsa38-crop"], processes=2, commit="abc", **places, say=said.append)
    assert code == 2
    assert any("no folder" in line and "nothing" in line for line in said)
    assert said[-1].startswith("  choice-gsa38-crop: ")
