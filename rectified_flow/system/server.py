"""Servers of pages for a browser on this machine."""

import errno
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from rectified_flow.errors import UsageError
from rectified_flow.system.files import LONGEST, printable

PORTS = 20
"""Number of ports that are tried, from the given one on."""

Server = TypeVar("Server", bound=ThreadingHTTPServer)


def bind(make: Callable[[tuple[str, int]], Server], host: str, port: int, remedy: str) -> Server:
    """Return a server that is bound to the first free port.

    Args:
        make: called with host and port.
        host: address that is listened on.
        port: the first port to try.
        remedy: end of the error message.

    Raises:
        UsageError: if no port is free, or the host is no address of this machine.
    """
    problem: Exception
    for number in range(port, min(port + PORTS, 65536)):
        try:
            return make((host, number))
        except (OSError, TypeError) as error:  # TypeError: a host that is no name of the internet
            problem = error
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                break
    address = f"host {printable(host)[:LONGEST]} with ports {port} to {number}"
    raise UsageError(f"{address} cannot be used ({problem}): {remedy}")


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the files of a folder without a line for each."""

    def log_message(self, *_arguments: Any) -> None:
        """Print nothing."""


def folder_server(folder: Path, port: int = 8000) -> ThreadingHTTPServer:
    """Return a server for the files of a folder that accepts connections from this machine only.

    Raises:
        UsageError: if no port is free.
    """
    handler = partial(QuietHandler, directory=folder)
    remedy = "stop a server on one of these ports, or leave out --open"
    return bind(lambda address: ThreadingHTTPServer(address, handler), "127.0.0.1", port, remedy)
