import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pictures import open_small, write_folder, write_shards


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "folder")


@pytest.fixture
def shards(tmp_path):
    write_shards(tmp_path / "shards" / "train")
    write_shards(tmp_path / "shards" / "val", (6, 7), start=100)
    return tmp_path / "shards"


@pytest.fixture(params=["memory", "loader", "shards"])
def kind(request):
    """Each way of reading a data set."""
    return request.param


@pytest.fixture
def open_kind(kind, request):
    """Open a small data set in the way `kind`, with settings of choice."""
    if kind == "shards":
        root = request.getfixturevalue("shards")
        path = f"wds:{root}/train/*.tar|{root}/val/shard-{{00..01}}.tar"
    else:
        path = str(request.getfixturevalue("folder"))

    def open_it(batch_size=8, seed=3, rank=0, world_size=1, path=path, **settings):
        return open_small(path, kind, batch_size, seed, rank, world_size, **settings)

    return open_it


@pytest.fixture
def serve():
    """Serve a folder over HTTP; returns its address. `handler` may misbehave."""
    servers = []

    def start(root, handler=SimpleHTTPRequestHandler):
        class Quiet(handler):
            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
