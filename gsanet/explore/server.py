"""Serve the explorer to the browsers of this machine, or of others where that is asked for."""

import contextlib
import errno
import importlib.util
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

from gsanet.predict import Classifier

FIRST_PORT, PORTS = 7860, 20  # Gradio's first port; the next ones are tried
MAX_UPLOAD = "200mb"
# The browser itself refuses whatever the page might want from elsewhere.
HEADERS = {
    b"content-security-policy": b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'self'",
    b"referrer-policy": b"no-referrer",
}


def serve(classifier: Classifier, host: str, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve the explorer until it is interrupted.

    Args:
        classifier: The network to explore; it needs GSA modules.
        host: The address to listen at. Only with 127.0.0.1 and the like do other machines not reach it.
        port: Default: 7860, or the first of the next few that is free. 0: any that is free.
        ready: Called with the page's address once it answers.
    """
    check_installed()
    with _listen(host, port) as listening, tempfile.TemporaryDirectory(prefix="gsanet-explore-") as uploads:
        # Before Gradio is imported: what it sends, and where it keeps what is uploaded.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        app = make_app(classifier)
        import uvicorn

        shown = f"[{host}]" if ":" in host else host

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                ready(f"http://{shown}:{listening.getsockname()[1]}")

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # pages that are cut off are no error
                await super().shutdown(sockets)

        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            # Open pages hold on to their connections: they are not waited for.
            Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)).run([listening])


def check_installed() -> None:
    """Say how to get what is missing."""
    if missing := [name for name in ("gradio", "skimage") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"the explorer needs {' and '.join(missing)}: pip install 'gsanet[explore]'")


def make_app(classifier: Classifier) -> Any:
    """The explorer as an ASGI application, for uvicorn or to be mounted elsewhere."""
    import gradio as gr
    from fastapi import FastAPI

    from gsanet.explore.app import CSS, build_page
    from gsanet.explore.study import Explorer

    system, mono = gr.themes.Font("system-ui"), gr.themes.Font("ui-monospace")
    theme = gr.themes.Default(
        primary_hue="violet",
        neutral_hue="slate",
        font=[system, gr.themes.Font("sans-serif")],
        font_mono=[mono, gr.themes.Font("monospace")],
    ).set(body_text_color_subdued="*neutral_500")
    page = build_page(Explorer(classifier))
    # As Gradio's launch() does. Without it, whoever reaches the page may name any file of this machine as an upload.
    page.has_launched = True
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Headers)
    return gr.mount_gradio_app(
        app,
        page,
        "",
        theme=theme,
        css=CSS,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        max_file_size=MAX_UPLOAD,
    )


class _Headers:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        await self.app(scope, receive, with_headers)


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else range(port, port + 1)
    for attempt in ports:
        try:
            return socket.create_server((host, attempt), family=family)
        except OSError as error:
            failure = error
            if error.errno != errno.EADDRINUSE:
                break
    asked = f"port {attempt}" if port is not None else f"ports {ports[0]} to {ports[-1]}"
    raise OSError(f"cannot listen at {host}, {asked}: {failure.strerror}; --host and --port say where else")
