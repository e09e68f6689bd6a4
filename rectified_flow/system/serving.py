"""Serve a folder to the browsers of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the files of a folder without a line for each."""

    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""


@contextmanager
def server_of(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[tuple[ThreadingHTTPServer, str]]:
    """Return a server of a folder that does not serve yet, and its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder)) as server:
        yield server, f"http://127.0.0.1:{server.server_port}"


@contextmanager
def serving(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """Serve a folder inside the block, in another thread, and return its address."""
    with server_of(folder, handler) as (server, address):
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"{address}/"
        server.shutdown()
