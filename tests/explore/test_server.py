"""The explorer as it is served: what it sends, to whom it listens, and the mistakes of its command."""

import importlib.util
import re
import socket
from pathlib import Path

import httpx
import pytest
from gradio_client import Client, handle_file
from PIL import Image
from starlette.testclient import TestClient

from gsanet.explore.server import make_app


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False, analytics_enabled=False)


def test_it_answers_and_lives_on(client, uploads):
    assert any("pixel 3, 3" in text for text in _texts(client.predict(api_name="/open_first")))
    for file in sorted(uploads.iterdir()):
        found = _texts(client.predict(handle_file(file), api_name="/open_file"))
        assert any(file.name in text for text in found) == (not file.name.startswith("bad")), file.name
    assert any("pixel 3, 3" in text for text in _texts(client.predict(api_name="/open_first")))


def _texts(answers):
    return [answer for answer in answers if isinstance(answer, str)]


def test_files_of_the_machine_are_not_to_be_had(address, digit):
    assert httpx.get(f"{address}/gradio_api/file={digit}").status_code == 403
    call = f"{address}/gradio_api/call/open_file"
    for path in (str(digit), "http://127.0.0.1/picture.png"):
        sent = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}]}
        event = httpx.post(call, json=sent).json()["event_id"]
        answer = httpx.get(f"{call}/{event}").text
        assert "event: error" in answer
        assert "map" not in answer


def test_it_listens_to_this_machine_alone(address):
    assert address.startswith("http://127.0.0.1:")
    port = int(address.rpartition(":")[2])
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.2", port), 2):
        pass


def test_nothing_leaves_the_machine(explorer, monkeypatch):
    """Neither the server nor the page it sends asks for anything elsewhere."""
    asked = []
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def note_name(host, *arguments, **options):
        asked.append(host)
        return resolve(host, *arguments, **options)

    def note_address(self, place):
        asked.append(place[0] if isinstance(place, tuple) else "127.0.0.1")
        return connect(self, place)

    monkeypatch.setattr(socket, "getaddrinfo", note_name)
    monkeypatch.setattr(socket.socket, "connect", note_address)
    with TestClient(make_app(explorer.classifier)) as client:
        answer = client.get("/")
    assert set(asked) <= {"127.0.0.1", "localhost", "::1"}
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "Where does a pixel look?" in answer.text
    wanted = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)\s*=\s*[\"']?(https?:[^\"' >]+)", answer.text)
    assert [url for url in wanted if not url.startswith("http://testserver")] == []
    assert '"analytics_enabled":false' in answer.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pandas, in Gradio
def test_a_click_is_answered_within_a_second():
    import explorer as benchmark

    found = benchmark.measure("gsa_resnet26_tiny", clicks=3)
    assert min(found.clicks) < benchmark.GOAL
    assert found.answer > 50_000  # with the maps


def test_help(gsanet):
    code, out, _ = gsanet("explore", "--help")
    assert code == 0
    assert "--host" in out
    assert "--share" not in out


def test_mistakes_are_one_line(gsanet, digits_run, tmp_path, monkeypatch):
    run = ["--run", digits_run / "gsa_resnet26_tiny"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, words in (
            (["--model", "gsa_resnet50"], "say which network"),
            (["--run", tmp_path / "none"], "there is no run directory"),
            (["--run", digits_run / "conv_resnet26_tiny"], "conv_resnet26_tiny has no GSA modules"),
            ([*run, "--port", port], f"cannot listen at 127.0.0.1, port {port}: Address already in use"),
            ([*run, "--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid, ports 7860 to 7879"),
        ):
            code, _, complaint = gsanet("explore", *arguments)
            assert code == 2, complaint
            assert words in complaint
            assert len(complaint.strip().splitlines()) == 1
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else found(name, *rest)
    )
    code, _, complaint = gsanet("explore", *run)
    assert (code, "the explorer needs gradio: pip install 'gsanet[explore]'" in complaint) == (2, True)


def test_the_picture_is_there_and_small():
    picture = Path(__file__).parents[2] / "docs" / "explorer.png"
    assert Image.open(picture).width == 1280
    assert picture.stat().st_size <= 400_000
