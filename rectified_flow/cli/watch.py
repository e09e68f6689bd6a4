"""watch.py: a page on this machine that shows runs while they train. It reads their folders, and writes nothing."""

import errno
import json
import mimetypes
import sys
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from rectified_flow.cli.run_flags import WatchConfig, WatchedConfig
from rectified_flow.errors import UsageError, require
from rectified_flow.runs.watched import WatchedRuns
from rectified_flow.system.terminal import lines

PACKAGE = Path(__file__).resolve().parent.parent
ASSETS = {
    "index.html": PACKAGE / "watch_page" / "index.html",
    "watch.mjs": PACKAGE / "watch_page" / "watch.mjs",
    "chart.mjs": PACKAGE / "watch_page" / "chart.mjs",
    "scale.mjs": PACKAGE / "watch_page" / "scale.mjs",
    "watch.css": PACKAGE / "watch_page" / "watch.css",
    "style.css": PACKAGE / "page" / "style.css",
}
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
REMEDY = "pass the --output_dir of a run, or a folder of runs"
PORTS = 20
"""Numbers that are tried from ``--port`` on."""


class Server(ThreadingHTTPServer):
    """Serves the page and what it asks for.

    Args:
        address: host and port.
        runs: to show.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], runs: WatchedRuns) -> None:
        super().__init__(address, Handler)
        self.runs, self._lock = runs, Lock()
        self.is_local = ip_address(str(self.server_address[0])).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback, unless the browser hung up, as it does when a page is closed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def report(self) -> bytes:
        """All runs, as JSON."""
        with self._lock:  # the runs read on from where they were
            return json.dumps(self.runs.report()).encode()

    def sample(self, run: str, name: str) -> bytes | None:
        """A grid of a run's samples."""
        with self._lock:
            watched = {str(number): each for number, each in self.runs.find().items()}.get(run)
        return None if watched is None else watched.sample(name)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server

    def do_GET(self) -> None:
        """Send an asset, the runs, or a grid of samples; nothing else has an address."""
        if self.server.is_local and not self._names_this_machine():
            self.send_error(403, "only by a name of this machine")
            return
        match urlsplit(self.path).path.split("/")[1:]:
            case ["runs.json"]:
                self._send(self.server.report(), "application/json")
            case ["samples", run, name]:
                self._send(self.server.sample(run, name), "image/png")
            case [name] if (name or "index.html") in ASSETS:
                asset = ASSETS[name or "index.html"]
                self._send(asset.read_bytes(), _type_of(asset))
            case _:
                self.send_error(404)

    def _names_this_machine(self) -> bool:
        """A page elsewhere could have its own name lead here, and read what is meant for this machine alone."""
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        try:
            return name == "localhost" or ip_address(name).is_loopback
        except ValueError:
            return False

    def _send(self, content: bytes | None, kind: str) -> None:
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in (headers | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        """Nothing: the page asks every few seconds."""


def _type_of(asset: Path) -> str:
    return "text/javascript" if asset.suffix == ".mjs" else mimetypes.guess_type(asset.name)[0] or "text/plain"


def serve(flags: WatchedConfig) -> Server:
    """A server that is bound, to the first free port from ``--port`` on.

    Raises:
        UsageError: if a folder does not exist, or no port is free.
    """
    for folder in flags.runs:
        require(folder.is_dir(), f"{folder} is no folder: {REMEDY}")
    for port in range(flags.port, min(flags.port + PORTS, 65536)):
        try:
            return Server((flags.host, port), WatchedRuns(flags.runs))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"--host {flags.host} --port {port} cannot be served ({error}): pass others"
                ) from error
    raise UsageError(f"--port {flags.port} and the {PORTS - 1} after it are taken: pass another")


def watch(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C. A folder without a run is no error: a run may begin in it later.

    Raises:
        UsageError: as :func:`serve`.
    """
    with serve(config.watched) as server:
        folders = ", ".join(map(str, config.watched.runs))
        address = f"http://{config.watched.host}:{server.server_address[1]}"
        texts = {"runs": f"{len(server.runs.find())} in {folders}", "page": f"{address}, until Ctrl-C"}
        print(lines(texts), flush=True)
        for folder in server.runs.empty():
            print(f"warning: {folder} holds no run yet: {REMEDY}", flush=True)
        if config.watched.open:
            webbrowser.open(address)
        server.serve_forever()
