"""Serve a folder to the browsers of this machine."""

import webbrowser
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
def serving(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """Serve a folder inside the block, in another thread, and return its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def browser_with_window() -> webbrowser.BaseBrowser | None:
    """Return the default browser; None if there is none, or one in the terminal, which would block the program."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return None
    is_text = type(browser) is webbrowser.GenericBrowser or not getattr(browser, "background", True)
    return None if is_text else browser
