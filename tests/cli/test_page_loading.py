"""How an exported page shows what it loads: all files that the visitor waits for, also if the host compresses them."""

import gzip
import json
import sys
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from rectified_flow.cli.export import export
from rectified_flow.cli.flags.sampling import ExportConfig
from rectified_flow.flags import parse
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.captions import Caption
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.server import QuietHandler
from tests.cli.test_export import small, tiny_encoder
from tests.cli.test_page import looking_at
from tests.patience import PATIENCE, wait_for
from tests.test_load import write

pytestmark = pytest.mark.page
READ = "() => { const bar = document.getElementById('loaded'); return [bar.value, bar.max]; }"


def test_a_bar_shows_how_much_of_all_files_is_loaded(tmp_path: Path, browser: Any) -> None:
    caption = Caption(tiny_encoder(tmp_path / "encoder"), 8, 6, ("a red flower",))
    write(RectifiedFlow(small(text=caption), space=Pixels((3, 8, 8))), tmp_path)
    sys.argv = ["export.py", "--checkpoint", str(tmp_path), "--format", "page"]
    export(parse(ExportConfig, "Export."))
    folder, goes_on, half = tmp_path / "exported", Event(), Event()
    names = ["ort/ort-wasm-simd-threaded.wasm", "model.onnx", "text_encoder.onnx"]
    sizes = {name: (folder / name).stat().st_size for name in names}

    class Slow(QuietHandler):
        """Sends the runtime in two halves, and everything compressed."""

        def do_GET(self) -> None:  # noqa: N802
            path = self.path.partition("?")[0].lstrip("/")
            if path not in names:
                super().do_GET()
                return
            content = gzip.compress((folder / path).read_bytes(), 1)
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            middle = len(content) // 2 if path.endswith(".wasm") else len(content)
            self.wfile.write(content[:middle])
            self.wfile.flush()
            if middle < len(content):
                half.set()
                goes_on.wait(PATIENCE)
                self.wfile.write(content[middle:])

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with looking_at(browser, f"http://127.0.0.1:{server.server_port}/") as shown:
            page, total = shown.page, sum(sizes.values())
            page.goto(shown.address)
            wait_for("the first half", half.is_set)
            rest = sizes["model.onnx"] + sizes["text_encoder.onnx"]
            wait_for("the bar", lambda: page.locator("#loading").is_visible() and page.evaluate(READ)[0] > rest)
            page.wait_for_timeout(500)
            value, greatest = page.evaluate(READ)
            assert greatest == total
            assert rest + 0.1 * (total - rest) < value < total
            assert shown.text("loaded-size") == f"{value / 1e6:.1f} of {total / 1e6:.1f} MB"
            assert page.locator("#progress").is_hidden()
            goes_on.set()
            shown.wait()
            assert page.locator("#loading").is_hidden()
            assert page.locator("#progress").is_visible()
        server.shutdown()
    listed = json.loads((folder / "model.json").read_text())["sizes"]
    assert sizes.items() <= listed.items()
    assert all((folder / name).stat().st_size == size for name, size in listed.items())
