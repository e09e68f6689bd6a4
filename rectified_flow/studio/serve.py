"""Serve the page: on this machine alone, unless a host and a password are given."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rectified_flow.errors import UsageError
from rectified_flow.studio.flags import LOCALHOST, PORT, StudioConfig
from rectified_flow.studio.jobs import STUDIO, resume
from rectified_flow.system.files import prepare_folder
from rectified_flow.system.terminal import lines

if TYPE_CHECKING:
    from gradio import Blocks

LARGEST_UPLOAD = "20gb"
USER = "studio"


def serve(config: StudioConfig) -> None:
    """Serve the page until Ctrl-C. What the page has started goes on."""
    flags = config.page
    page = open_page(flags.runs, port=flags.port, host=flags.host, password=flags.password, in_browser=flags.open)
    try:
        while True:
            time.sleep(3600)
    finally:
        page.close(verbose=False)
        print("The page is closed. Running trainings continue; start the studio again to see them.", flush=True)


def open_page(
    runs: Path,
    *,
    port: int | None = None,
    host: str = LOCALHOST,
    password: str | None = None,
    in_browser: bool = False,
    inline: bool = False,
) -> "Blocks":
    """Start to serve the page of a folder of runs, print its address, and return the page."""
    prepare_folder("runs", runs)
    uploads = runs / STUDIO / "uploads"
    os.environ["GRADIO_TEMP_DIR"] = str(uploads.absolute())
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    resume(runs)
    from rectified_flow.studio import page as pages

    page = pages.build(runs, is_local=host == LOCALHOST)
    page.launch(
        server_name=host,
        server_port=port or free_port(host),
        auth=None if password is None else (USER, password),
        share=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        inline=inline,
        inbrowser=in_browser,
        prevent_thread_lock=True,
        quiet=True,
        show_error=True,
        allowed_paths=[str(runs.absolute())],
        max_file_size=LARGEST_UPLOAD,
        footer_links=[],
        theme=pages.theme(),
        css_paths=[pages.CSS],
    )
    print(lines(words(page.local_url, runs, host)), flush=True)
    return page


def words(address: str, runs: Path, host: str) -> dict[str, object]:
    """Return the lines that the program prints: the address, and how to open it from elsewhere."""
    port = address.rstrip("/").rpartition(":")[2]
    texts: dict[str, object] = {"studio": f"{address} until Ctrl-C", "runs": runs.absolute()}
    if host == LOCALHOST and ("SSH_CONNECTION" in os.environ or not sys.stdout.isatty()):
        texts["remote"] = (
            f"on your own machine, run ssh -N -L {port}:{LOCALHOST}:{port} THIS_MACHINE, then open {address}"
        )
    return texts


def free_port(host: str) -> int:
    """Return the first free port from :data:`PORT` on."""
    for port in range(PORT, PORT + 100):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((host, port))
                return port
            except OSError as error:
                last = error
    raise UsageError(f"no port from {PORT} to {PORT + 99} is free on {host} ({last.strerror}): pass another `host`")
