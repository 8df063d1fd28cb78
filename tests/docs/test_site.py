"""The documentation site builds strictly, holds what the package holds, and needs nothing from elsewhere."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from built_pages import dead_ends, loaded_from_elsewhere, read_pages
from documents import PAGES, ROOT

import gsanet
from gsanet.cli import app

PUBLIC = ["gsanet", "gsanet.functional", "gsanet.layers", "gsanet.models", "gsanet.explain"]
# A part that was not put in, a reference to a name without a page, a formula that was not typeset.
UNFINISHED = ["--8&lt;--", "--8<--", "][gsanet", "arithmatex", "merror"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the site's builder needs Python 3.11")
def test_the_site(tmp_path):
    """One test, because building takes a while and the workers of pytest share nothing."""
    for name in ("docs", "gsanet", "results"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    build = [sys.executable, str(tmp_path / "docs" / "build.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(build, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    site = tmp_path / "site"
    assert loaded_from_elsewhere(site) == []
    assert dead_ends(site) == []

    pages = read_pages(site)
    texts = {str(file.relative_to(site)): file.read_text(encoding="utf-8") for file in pages}
    written = {name.removeprefix("docs/").replace(".md", ".html") for name in PAGES if name.startswith("docs/")}
    assert set(texts) == written | {"404.html"}
    for name, text in texts.items():
        left = [mark for mark in UNFINISHED if mark in text]
        assert not left, (name, left)

    assert all(f"<code>{name}</code>" in texts["networks.html"] for name in gsanet.list_models())
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert all(f"<code>gsanet {name}</code>" in texts["commands.html"] for name in commands)
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    names = {name for module in PUBLIC for name in importlib.import_module(module).__all__} - {
        "functional",
        "__version__",
    }
    assert {name for name in names if not any(f"{module}.{name}" in anchors for module in PUBLIC)} == set()


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")]
    assert [page for page in pages if not re.search(rf"(- |: ){page}\n", menu)] == []


def test_what_is_wrong_with_a_page_is_found(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    styles = "@import 'https://fonts.example/a.css'; a { background: url(//cdn.example/b.png) }"
    (site / "site.css").write_text(styles)
    (site / "other.html").write_text("<h1 id=here>Other</h1>")
    (site / "index.html").write_text(
        '<link rel=stylesheet href="https://c.example/c.css"><link rel=canonical href="https://d.example">'
        '<link rel=stylesheet href=site.css><script src="http://e.example/e.js"></script>'
        "<style>a { b: url(http://f.example) }</style>"
        '<img src=missing.png srcset="https://g.example/g.png 2x"><a href="https://h.example">text</a>'
        '<a href="other.html#here">there</a><a href="other.html#nowhere">x</a>'
        '<a href="gone.html">x</a><a href="#top">x</a><a href="../outside.json">x</a>'
    )
    hosts = {urlsplit(address).netloc for _, address in loaded_from_elsewhere(site)}
    assert hosts == {f"{name}.example" for name in ("fonts", "cdn", "c", "e", "f", "g")}
    dead = {address for _, address in dead_ends(site)}
    assert dead == {"missing.png", "other.html#nowhere", "gone.html", "#top", "../outside.json"}
