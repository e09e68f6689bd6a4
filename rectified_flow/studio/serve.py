"""Serve the page: on this machine alone, unless a host and a password are given."""

import os
import signal
import sys

from rectified_flow.errors import UsageError
from rectified_flow.studio.flags import LOCALHOST, PageConfig, StudioConfig
from rectified_flow.studio.jobs import STUDIO, resume
from rectified_flow.system.files import prepare_folder
from rectified_flow.system.terminal import lines

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
            inbrowser=flags.open,
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            allowed_paths=[str(runs.absolute())],
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
