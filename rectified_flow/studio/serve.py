"""Serve the page: on this machine alone, unless a host and a password are given."""

import os
import signal
import sys
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from rectified_flow.errors import UsageError
from rectified_flow.studio.flags import LOCALHOST, PageConfig, StudioConfig
from rectified_flow.studio.jobs import STUDIO, jobs, resume
from rectified_flow.system.files import prepare_folder, writing
from rectified_flow.system.serving import browser_with_window
from rectified_flow.system.terminal import lines

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_UPLOAD = "20gb"
USER = "studio"
TUNNEL = "on your own machine, run ssh -N -L {port}:127.0.0.1:{port} THIS_MACHINE, then open http://127.0.0.1:{port}/"


def serve(config: StudioConfig) -> None:
    """Serve the page until Ctrl-C. What the page has started goes on."""
    open_page(config.page)
    try:
        signal.pause()
    finally:
        print("The page is closed. Running trainings continue; start the studio again to see them.", flush=True)


def open_page(flags: PageConfig, *, inline: bool = False) -> None:
    """Serve the page of a folder of runs in another thread, and print its address."""
    runs = prepare_folder("runs", flags.runs).absolute()  # jobs outlive the folder in which the studio was started
    os.environ["GRADIO_TEMP_DIR"] = str(runs / STUDIO / "uploads")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    resume(runs)
    from starlette.middleware import Middleware

    from rectified_flow.studio import page as pages

    page = pages.build(runs)
    try:
        page.launch(
            server_name=flags.host,
            server_port=flags.port,
            auth=(USER, flags.password) if flags.password else None,
            share=False,
            enable_monitoring=False,
            inline=inline,
            inbrowser=flags.open and browser_with_window() is not None,
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            allowed_paths=[str(runs)],
            app_kwargs={"middleware": [Middleware(sandboxed, runs=runs)]},
            max_file_size=LARGEST_UPLOAD,
            footer_links=[],
            theme=pages.THEME,
            css_paths=[pages.CSS],
        )
    except OSError as error:
        busy = f"port {flags.port}" if flags.port else "every port from 7860 to 7959"
        raise UsageError(f"{busy} is unavailable on {flags.host}: pass another `port` or `host`") from error
    texts: dict[str, object] = {"studio": f"{page.local_url} until Ctrl-C", "runs": runs}
    if flags.host == LOCALHOST and ("SSH_CONNECTION" in os.environ or not sys.stdout.isatty()):
        texts["remote"] = TUNNEL.format(port=page.server_port)
    print(lines(texts), flush=True)


def sandboxed(app: "ASGIApp", runs: Path) -> "ASGIApp":
    """Wrap the application of the page: no file runs a script at the address of the studio, except for exports.

    If the disk is full, the page shows an error message in place of a status code.
    """
    from starlette.responses import PlainTextResponse

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def send_sandboxed(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"content-security-policy", b"sandbox"))
            await send(message)

        _, is_file, path = scope.get("path", "").partition("/gradio_api/file")
        file = Path(os.path.abspath(path[1:])).resolve()  # after "=" or "/"
        is_export = is_file and any(file.is_relative_to(job.output_folder.resolve()) for job in jobs(runs, "page"))
        handled = app(scope, receive, send_sandboxed if is_file and not is_export else send)
        if not scope.get("path", "").endswith("/upload"):
            return await handled
        try:  # Gradio writes dropped files outside of the events
            with writing("the files", UsageError, "make room on the disk, and drop them again"):
                await handled
        except UsageError as error:
            await PlainTextResponse(str(error), HTTPStatus.INSUFFICIENT_STORAGE)(scope, receive, send)

    return answer
