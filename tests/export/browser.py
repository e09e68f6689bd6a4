"""An exported page in a browser."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.system.serving import serving
from tests.patience import PATIENCE
from tests.programs import call
from tests.tiny_flows import write

HAS_CARD = "Promise.resolve(navigator.gpu?.requestAdapter()).then(Boolean)"
UNNAMED = """() => [...document.querySelectorAll("input, select, button")]
  .filter((each) => each.checkVisibility() && !each.ariaLabel && !each.labels?.[0]?.innerText && !each.innerText)
  .map((each) => each.id)"""
"""Controls on the page that have no name."""
PIXELS = """index => {
  const canvas = document.querySelectorAll("#pictures canvas")[index];
  return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
}"""


class Shown:
    """An exported page in a browser."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE * 100)
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.context.on("request", lambda request: self.requests.append(request.url))
        self.address = address

    def open(self, query: str = "") -> None:
        self.page.goto(self.address + query)
        self.wait()

    def wait(self, condition: str = "true") -> None:
        """Wait for the pictures; Playwright's own way evaluates a string, which the page forbids."""
        until = time.monotonic() + PATIENCE
        while not self.page.evaluate(f"Boolean(document.body.dataset.drawn) && ({condition})"):
            assert time.monotonic() < until, "nothing was drawn"
            self.page.wait_for_timeout(20)

    def set(self, name: str, value: object) -> None:
        """Give a control a value as a person does, and wait for the pictures."""
        self.page.evaluate(
            """([name, value]) => {
                document.body.dataset.drawn = "";
                const control = document.getElementById(name);
                control.value = value;
                control.dispatchEvent(new Event("input"));
            }""",
            [name, str(value)],
        )
        self.wait()

    def text(self, name: str) -> str:
        return str(self.page.inner_text(f"#{name}"))

    def drop(self, file: Path) -> None:
        """Drop a file in the middle of the page, as a mouse does."""
        mouse = self.page.context.new_cdp_session(self.page)
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            mouse.send("Input.dispatchDragEvent", {"type": kind, "x": 195, "y": 400, "data": data})

    def click(self, name: str) -> None:
        self.page.evaluate("document.body.dataset.drawn = ''")
        self.page.click(f"#{name}")
        self.wait()

    def picture(self, number: int = 0) -> np.ndarray:
        return np.array(self.page.evaluate(PIXELS, number)).reshape(8, 8, 4)[..., :3]


def export_page(flow: Flow, folder: Path, degrade: str | None = None) -> Path:
    """Export the page of a flow whose run is in ``folder``, and return the page's folder."""
    write(flow, folder, degrade=degrade)
    call("export.py", "--checkpoint", folder, "--format", "page")
    return folder / "exported"


@contextmanager
def looking_at(browser: Any, address: str, **options: Any) -> Iterator[Shown]:
    """A phone's view of the page; at the end nothing has gone wrong there, and nothing was asked of other hosts."""
    options = {"service_workers": "block"} | options  # a kept page would not ask for the files that tests replace
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark", **options)
    shown = Shown(page, address)
    yield shown
    assert shown.problems == []
    outside = [url for url in shown.requests if not url.startswith((shown.address, "blob:", "data:"))]
    assert outside == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "as wide as a phone"
    page.close()


def drawn(flow: Flow, seed: int, numbers: int = 1, **options: Any) -> np.ndarray:
    """Return the pictures that sample.py generates."""
    options.setdefault("steps", flow.default_steps)
    if isinstance(flow, RectifiedFlow) and flow.default_guidance != 1:
        options.setdefault("guidance", Guidance(flow.default_guidance))
    [(_, pictures)] = sample_batches(flow, range(numbers), seed=seed, **options)
    return pictures.permute(0, 2, 3, 1).numpy().astype(int)


@contextmanager
def page_of(flow: Flow, folder: Path, browser: Any) -> Iterator[Shown]:
    """Show the page of a flow, which is not opened yet."""
    with serving(export_page(flow, folder)) as address, looking_at(browser, address) as shown:
        yield shown
