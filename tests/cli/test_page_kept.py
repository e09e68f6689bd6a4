"""Tests of links to an exported page, of downloads from the page, and of the page without a network."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rectified_flow.cli.export import QuietHandler, finished, page_sources
from rectified_flow.condition import Labels, Number
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.cli.browser import Shown, export_page, looking_at, serving
from tests.cli.test_export import small
from tests.patience import wait_for

pytestmark = pytest.mark.page


def flow_with_conditions() -> Flow:
    caption = Caption(BagOfWords(("red", "flower", "two")), 3, 0, ("a red flower", "two"))
    conditions = {"text": caption, "size": Number((0.0, 1.5, 8.0)), "species": Labels(2, ("cat", "dog"))}
    return RectifiedFlow(small(**conditions), space=Pixels((3, 8, 8)))


@dataclass
class Page:
    """The folder and the address of an exported page, and the paths that were asked for."""

    folder: Path
    address: str
    asked: list[str]


@pytest.fixture(scope="module")
def rectified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    asked: list[str] = []

    class Noting(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            asked.append(self.path)
            super().do_GET()

    page = export_page(flow_with_conditions(), tmp_path_factory.mktemp("rectified"))
    with serving(page, Noting) as address:
        yield Page(page, address, asked)


def downloaded(shown: Shown, action: Callable[[], None]) -> tuple[str, np.ndarray]:
    """The name and the pixels of the file that an action saves."""
    with shown.page.expect_download() as download:
        action()
    with Image.open(download.value.path()) as picture:
        assert picture.format == "PNG"
        return download.value.suggested_filename, np.array(picture.convert("RGB"))


def test_a_link_restores_the_picture_and_all_controls(browser: Any, rectified: Page) -> None:
    given = {"seed": 7, "steps": 5, "guidance": 2.5, "condition-size": 3, "condition-species": 1}
    with looking_at(browser, rectified.address, has_touch=True) as shown:
        shown.open("?backend=wasm")
        first = shown.picture()
        shown.page.fill("#condition-text", "two & a #flower")
        shown.page.keyboard.press("Enter")
        for name, value in given.items():
            shown.set(name, value)
        picture = shown.picture()
        shown.page.tap("#link")
        wait_for("a message", lambda: "copied" in shown.text("status"))
        link = shown.page.url
        shown.page.evaluate(
            "location.hash = '#seed=0&steps=16&guidance=1&condition-text=a+red+flower&condition-size=1.5'"
        )
        shown.page.evaluate("document.body.dataset.drawn = ''")
        shown.page.evaluate("location.hash = '#condition-species='")
        shown.wait("document.getElementById('condition-species').value === ''")
    assert link.startswith(f"{rectified.address}?backend=wasm#")
    assert not np.array_equal(picture, first)
    with looking_at(browser, link) as shown:
        shown.address = rectified.address
        shown.page.goto(link)
        shown.wait()
        assert np.abs(shown.picture().astype(int) - picture).max() <= 2
        assert {name: float(shown.page.input_value(f"#{name}")) for name in given} == given
        assert shown.page.input_value("#condition-text") == "two & a #flower"


def test_a_link_between_two_seeds_and_one_without_meaning(browser: Any, rectified: Page) -> None:
    with looking_at(browser, rectified.address) as shown:
        shown.open()
        default = shown.picture()
        shown.page.click("#hold-a")
        shown.set("seed", 9)
        shown.page.click("#hold-b")
        shown.set("mix", 0.25)
        middle = shown.picture()
        shown.page.click("#link")
        link = shown.page.url
        shown.page.goto("about:blank")
        shown.page.goto(link)
        shown.wait()
        assert np.abs(shown.picture().astype(int) - middle).max() <= 2
        assert (shown.text("hold-a"), shown.text("hold-b")) == ("A: 0", "B: 9")
        name, _ = downloaded(shown, lambda: shown.page.click("#download"))
        assert name == "seed-0-to-9-at-0.25.png"
        shown.page.goto("about:blank")
        wrong = (
            "#seed=-3&steps=x&guidance=&mix=2&condition-species=99&condition-size=any%22%3E&condition-text=zebra&x=1"
        )
        shown.page.goto(rectified.address + wrong)
        shown.wait()
        assert shown.page.input_value("#condition-species") == ""
        assert "knows no word of this text" in shown.text("condition-text-note")
        assert shown.page.input_value("#mix") == "0"
        assert shown.picture().shape == default.shape


def test_a_download_has_the_drawn_picture(browser: Any, rectified: Page) -> None:
    with looking_at(browser, rectified.address, has_touch=True) as shown:
        shown.open()
        shown.set("seed", 12)
        picture = shown.picture()
        name, pixels = downloaded(shown, lambda: shown.page.tap("#download"))
        assert name == "seed-12.png"
        assert np.array_equal(pixels, picture)
        shown.page.focus("#download-large")
        name, pixels = downloaded(shown, lambda: shown.page.keyboard.press("Enter"))
        assert name == "seed-12-4x.png"
        assert np.array_equal(pixels, picture.repeat(4, axis=0).repeat(4, axis=1))


def test_the_page_works_without_a_network_after_a_visit(browser: Any, rectified: Page) -> None:
    kept = "caches.keys().then((names) => names.join())"
    with looking_at(browser, rectified.address, service_workers="allow") as shown:
        shown.open()
        shown.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        picture, version = shown.picture(), shown.page.evaluate(kept)
        assert version.startswith(f"{rectified.address} ")
        assert not [path for path in rectified.asked if "webgpu" in path or "asyncify" in path], "only one runtime"
        shown.page.context.set_offline(True)
        before = len(rectified.asked)
        for query in ("", "?backend=wasm", "index.html#seed=0"):
            shown.page.goto("about:blank")
            shown.open(query)
            assert np.array_equal(shown.picture(), picture)
        shown.set("seed", 5)
        assert not np.array_equal(shown.picture(), picture)
        assert {path.partition("?")[0] for path in rectified.asked[before:]} <= {"/offline.js"}, (
            "an update is asked for"
        )
        shown.problems.clear()  # the browser says that there is no network

        shown.page.context.set_offline(False)
        program = {"model.onnx": (rectified.folder / "model.onnx").read_bytes()}
        description = json.loads((rectified.folder / "model.json").read_text())
        for name, content in finished(page_sources() | program, description | {"changed": True}).items():
            (rectified.folder / name).write_bytes(content)
        shown.page.reload()
        shown.wait()
        wait_for("the new version", lambda: shown.page.evaluate(kept) != version)
        wait_for("one version", lambda: "," not in shown.page.evaluate(kept))
