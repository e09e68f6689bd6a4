"""Tests of an exported page in a browser: its pictures, its controls and its requests."""

from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.measurements.space import Fields
from rectified_flow.networks.unet import Unet
from tests.cli.browser import HAS_CARD, Shown, drawn, export_page, looking_at, page_of, serving
from tests.patience import wait_for
from tests.test_load import FLOWS

pytestmark = pytest.mark.page
SEEDS = [0, 7, 4_000_000_000]
SOFTWARE_ONLY = "Drawn by the processor (WASM): WebGPU finds no graphics card, only software."
RUNTIME = "**/ort.webgpu.bundle.min.js"
BROKEN = """
export const env = { wasm: {} };
export class Tensor {}
const run = async () => { WHEN_RUN };
export const InferenceSession = { create: async () => { WHEN_CREATED; return { run, outputNames: ["v"] }; } };
"""
"""A runtime for WebGPU that fails."""


@pytest.fixture(scope="module", params=FLOWS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Flow, str]]:
    """A flow with the classes cat and dog, and the address of its page."""
    flow, folder = FLOWS[request.param](), tmp_path_factory.mktemp(request.param)
    with serving(export_page(flow, folder)) as address:
        yield flow, address


@pytest.fixture
def shown(browser: Any, exported: tuple[Flow, str]) -> Iterator[Shown]:
    with looking_at(browser, exported[1]) as shown:
        shown.open()
        yield shown


@pytest.fixture
def on_card(browser_with_card: Any, exported: tuple[Flow, str]) -> Iterator[Shown]:
    with looking_at(browser_with_card, exported[1]) as shown:
        shown.page.goto(shown.address)
        if not shown.page.evaluate(HAS_CARD):
            pytest.skip("this chromium has no WebGPU adapter, not even of software")
        yield shown


def test_the_first_pictures_are_those_of_sample(exported: tuple[Flow, str], shown: Shown) -> None:
    flow, _ = exported
    for seed in SEEDS:
        shown.set("seed", seed)
        assert np.abs(shown.picture() - drawn(flow, seed)[0]).max() <= 2
    if hasattr(flow, "average_velocity"):
        expected = drawn(flow, SEEDS[-1], 16)
        assert all(np.abs(shown.picture(i) - expected[i]).max() <= 2 for i in range(16))


def test_webgpu_draws_the_pictures_of_sample(exported: tuple[Flow, str], on_card: Shown) -> None:
    flow, _ = exported
    on_card.open("?backend=webgpu")
    assert on_card.text("backend") == "Drawn by the graphics card (WebGPU)."
    for seed in SEEDS[:2]:
        on_card.set("seed", seed)
        assert np.abs(on_card.picture() - drawn(flow, seed)[0]).max() <= 2
    assert on_card.page.evaluate("document.body.dataset.backend") == "webgpu", "to the end"
    on_card.page.click("#other")
    on_card.wait()
    assert on_card.text("backend") == "Drawn by the processor (WASM): as the address asks."
    assert np.abs(on_card.picture() - drawn(flow, 0)[0]).max() <= 2


@pytest.mark.parametrize(
    ("when_created", "when_run", "reason"),
    [
        ("throw new Error('no shaders')", "", "WebGPU failed: no shaders"),
        ("", "throw new Error('the card is lost')", "WebGPU failed: the card is lost"),
        ("", "return { v: { data: new Float32Array(192).fill(NaN) } }", "WebGPU failed: its output is not usable"),
    ],
)
def test_where_webgpu_fails_the_processor_draws(
    exported: tuple[Flow, str], on_card: Shown, when_created: str, when_run: str, reason: str
) -> None:
    broken = BROKEN.replace("WHEN_CREATED", when_created).replace("WHEN_RUN", when_run)
    on_card.page.route(RUNTIME, lambda route: route.fulfill(body=broken, content_type="text/javascript"))
    on_card.open("?backend=webgpu")
    assert on_card.text("backend") == f"Drawn by the processor (WASM): {reason}."
    assert np.abs(on_card.picture() - drawn(exported[0], 0)[0]).max() <= 2


def test_without_a_graphics_card_the_processor_draws(shown: Shown, on_card: Shown) -> None:
    assert shown.text("backend") == "Drawn by the processor (WASM): WebGPU finds no graphics card."
    on_card.open()
    assert on_card.text("backend") == SOFTWARE_ONLY


def test_neither_the_page_nor_its_worker_can_ask_another_host(shown: Shown) -> None:
    asked: list[str] = []

    class Other(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        outside = f"http://127.0.0.1:{other.server_port}/"
        [worker] = shown.page.workers
        for place in (shown.page, worker):
            for attempt in (f"fetch('{outside}', {{ mode: 'no-cors' }})", f"import('{outside}')"):
                assert place.evaluate(f"{attempt}.then(() => 'answered', () => 'refused')") == "refused"
        other.shutdown()
    assert asked == []
    assert any("Content Security Policy" in problem for problem in shown.problems)
    shown.problems.clear()
    shown.requests.clear()


def test_a_dropped_picture_is_varied_and_another_file_is_refused(
    exported: tuple[Flow, str], shown: Shown, tmp_path: Path
) -> None:
    flow, _ = exported
    given = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    Image.fromarray(given).save(tmp_path / "given.png")
    (tmp_path / "notes.txt").write_text("no picture")
    noise = shown.picture()
    shown.drop(tmp_path / "notes.txt")
    wait_for("a message", lambda: shown.page.get_attribute("#status", "class") == "failed")
    sentence = "notes.txt is not a picture that this browser can read, or is too large."
    assert shown.text("status") == f"{sentence} Choose a PNG, JPEG or WebP file."
    assert shown.page.locator("#level").is_hidden()
    shown.drop(tmp_path / "given.png")
    wait_for("the picture", shown.page.locator("#level").is_visible)
    shown.set("level", 0.3)
    assert "failed" not in (shown.page.get_attribute("#status", "class") or "")
    start = torch.from_numpy(given).permute(2, 0, 1)[None]
    assert np.abs(shown.picture() - drawn(flow, 0, start=start, strength=0.3)[0]).max() <= 2
    shown.click("forget")
    assert np.array_equal(shown.picture(), noise)


def test_the_controls_change_what_is_drawn(exported: tuple[Flow, str], shown: Shown) -> None:
    flow, _ = exported
    is_map = hasattr(flow, "average_velocity")
    shown.set("seed", 3)
    shown.set("condition-labels", 1)
    shown.set("steps", 5)
    dog: dict[str, Any] = {"conditions": {"labels": torch.tensor([1])}, "steps": 5}
    assert np.abs(shown.picture() - drawn(flow, 3, **dog)[0]).max() <= 2
    if not is_map:
        shown.set("guidance", 3)
        assert np.abs(shown.picture() - drawn(flow, 3, guidance=Guidance(3.0), **dog)[0]).max() <= 2
        shown.set("guidance", 1)

    before = shown.picture()
    shown.page.click("#hold-a")
    shown.page.focus("#hold-a")
    shown.page.keyboard.press("ArrowRight")
    shown.wait("document.getElementById('seed').value === '4'")
    after = shown.picture()
    assert np.abs(after - drawn(flow, 4, **dog)[0]).max() <= 2
    shown.page.click("#hold-b")
    shown.set("mix", 0.5)
    middle = shown.picture()
    assert not np.array_equal(middle, before)
    assert not np.array_equal(middle, after)
    shown.set("mix", 0)
    assert np.array_equal(shown.picture(), before)

    shown.click("new")
    assert not np.array_equal(shown.picture(), before)
    if is_map:
        shown.set("seed", 3)
        shown.set("walk", 1)
        assert np.abs(shown.picture() - after).max() <= 2


def test_measurements_are_shown_in_their_colours(browser: Any, tmp_path: Path) -> None:
    space = Fields((2, 8, 8), (0.0, 280.0), (1.0, 290.0), show="2:magma", files={"suffix": ".npy"})
    network = Unet(8, (1, 2), channels=2, image_size=8, attention_sides=())
    torch.manual_seed(0)
    torch.nn.init.normal_(network.conv_out.weight, std=0.3)
    flow = RectifiedFlow(network, space=space)
    with page_of(flow, tmp_path, browser) as shown:
        shown.open()
        for seed in SEEDS:
            shown.set("seed", seed)
            expected = drawn(flow, seed)[0]
            assert len(np.unique(expected.reshape(-1, 3), axis=0)) > 20
            assert np.abs(shown.picture() - expected).max() <= 8, "colours next to each other differ by up to 8"
        assert shown.text("legend").split() == ["280", "290"]
