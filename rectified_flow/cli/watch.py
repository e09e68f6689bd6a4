"""watch.py: a page on this machine that shows runs while they train. It reads their folders, and writes nothing."""

import mimetypes
import sys
import webbrowser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from rectified_flow.cli.flags.sampling import WatchConfig, WatchedConfig
from rectified_flow.errors import UsageError
from rectified_flow.runs.watched import WatchedRun, WatchedRuns, runs_in
from rectified_flow.system.server import bind
from rectified_flow.system.terminal import lines

PACKAGE = Path(__file__).resolve().parent.parent
PAGE = PACKAGE / "watch_page"
ASSETS = {path.name: path for path in [*PAGE.iterdir(), PACKAGE / "page" / "style.css"]}
ASSETS[""] = PAGE / "index.html"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
REMEDY = "pass the --output_dir of a run, or a folder of runs"


class Server(ThreadingHTTPServer):
    """Serves the page, the reports of runs, and their grids of samples.

    Args:
        address: host and port.
        runs: the runs to show.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], runs: WatchedRuns) -> None:
        super().__init__(address, Handler)
        self.runs, self.lock = runs, Lock()
        self.is_local = ip_address(str(self.server_address[0])).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback, unless the browser hung up, as it does when a page is closed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    timeout = 30
    """Seconds after which a connection without a whole request is closed."""

    def do_GET(self) -> None:
        """Send an asset, the reports of all runs, a grid of samples or a film of them; anything else is not found."""
        if self.server.is_local and not self._names_this_machine():
            self.send_error(403, "only by a name of this machine")
            return
        match self.path.partition("?")[0].split("/")[1:]:
            case ["runs.json"]:
                with self.server.lock:  # each report reads on where the last one ended
                    content = self.server.runs.report().encode()
                self._send(content, "application/json")
            case ["samples", number, name]:
                run = self._run(number)
                self._send(run.sample(name) if run else None, "image/png")
            case ["film", number, "film.gif"]:
                run = self._run(number)
                self._send(_film(run) if run else None, "image/gif")
            case [name] if name in ASSETS:
                self._send(ASSETS[name].read_bytes(), mimetypes.guess_type(ASSETS[name])[0] or "text/plain")
            case _:
                self.send_error(404)

    def end_headers(self) -> None:
        """Add the headers of every answer, errors included."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_arguments: Any) -> None:
        """Print nothing: the page asks every few seconds."""

    def _names_this_machine(self) -> bool:
        """Return whether the request names this machine.

        A page on another site could give its own name this machine's address, and read the answers.
        """
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return name == "localhost" or ip_address(name).is_loopback
        except ValueError:
            return False

    def _run(self, number: str) -> WatchedRun | None:
        with self.server.lock:
            return {str(each): run for each, run in enumerate(self.server.runs.find())}.get(number)

    def _send(self, content: bytes | None, kind: str) -> None:
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _film(run: WatchedRun) -> bytes | None:
    """Return the film of a run as a GIF; None if there are fewer than two grids of one size."""
    from rectified_flow.runs.film import film_of  # loads torch, which only this address needs

    with suppress(OSError, UsageError):
        return film_of(run.grids(), "gif")
    return None


def serve(flags: WatchedConfig) -> Server:
    """Return a server that is bound, to the first free port from ``--port`` on.

    Raises:
        UsageError: if a folder does not exist, or no port is free.
    """
    for folder in flags.runs:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: {REMEDY}")
    make = lambda address: Server(address, WatchedRuns(flags.runs))  # noqa: E731
    return bind(make, flags.host, flags.port, "pass another --host or --port")


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
        if not server.is_local:
            print("warning: everyone who can reach this machine can see the page (--host)", flush=True)
        for folder in server.runs.folders:
            if not runs_in(folder):
                print(f"warning: {folder} holds no run yet: {REMEDY}", flush=True)
        if config.watched.open:
            webbrowser.open(address)
        server.serve_forever()
