"""Tests of an exported page in a browser: pictures, controls, requests, links, downloads, and no network."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rectified_flow.condition import Labels, Number
from rectified_flow.export.web_page import finished, page_sources
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.measurements.space import Fields
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.serving import QuietHandler
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.export.browser import HAS_CARD, UNNAMED, Shown, drawn, export_page, looking_at, page_of, serving
from tests.patience import wait_for
from tests.text.tiny_encoder import tiny_encoder
from tests.tiny_flows import FLOWS, flow_with_conditions, unet_with

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


SHAPE = (3, 8, 8)
EXAMPLES = ("a red flower", "two blue flowers, and a cat")
LATER = "document.body.dataset.drawn = ''"


def values_of(flow: Flow, **texts: str | None) -> dict[str, torch.Tensor]:
    """The values of a written condition; None is "none"."""
    kinds: Any = {name: flow.conditions[name.removesuffix("_")] for name in texts}
    return {
        name.removesuffix("_"): kinds[name].none(1, torch.device("cpu")) if text is None else kinds[name].parse([text])
        for name, text in texts.items()
    }


def differs(shown: Shown, flow: Flow, values: dict[str, torch.Tensor], **options: Any) -> int:
    return int(np.abs(shown.picture() - drawn(flow, 0, conditions=values, **options)[0]).max())


def test_a_text_a_number_and_a_label_are_chosen(tmp_path: Path, browser: Any) -> None:
    """The pictures are those of sample.py for the same values, and also where one has none."""
    encoder = BagOfWords.of(EXAMPLES)
    caption = Caption(encoder, encoder.size, 0, EXAMPLES)
    columns: dict[str, Any] = {
        "text": caption,
        "petal_length": Number((0.0, 1.5, 3.0, 8.0, 20.0)),
        "class": Labels(2, ("cat", "dog")),
    }
    flow = RectifiedFlow(unet_with(**columns), space=Pixels(SHAPE))
    with page_of(flow, tmp_path, browser) as shown:
        shown.open()
        page = shown.page
        assert page.evaluate(UNNAMED) == []
        assert page.get_by_label("Text", exact=True).input_value() == EXAMPLES[0]
        chosen: dict[str, str | None] = {"text": EXAMPLES[0], "petal_length": "3"}
        assert differs(shown, flow, values_of(flow, **chosen)) <= 2, "the label is drawn by the seed"

        shown.set("condition-class", 1)
        shown.set("condition-petal_length", 12)
        assert shown.text("conditions").split("\n")[:2] == ["Petal length", "12"]
        page.evaluate(LATER)
        page.get_by_label("Text", exact=True).fill("Two cats and a CAT")
        shown.wait()
        chosen = {"text": "two cats and a cat", "petal_length": "12", "class_": "dog"}
        assert differs(shown, flow, values_of(flow, **chosen)) <= 2
        note = "Ignored, because the training captions do not contain them: cats."
        assert page.inner_text("#condition-text-note") == note

        before = shown.picture()
        page.get_by_label("Text", exact=True).fill("nothing known")
        page.keyboard.press("Enter")
        note = page.inner_text("#condition-text-note")
        assert note.startswith("The model knows no word of this text. It knows words such as ")
        assert note.endswith("The picture still shows “Two cats and a CAT”.")
        assert np.array_equal(shown.picture(), before)
        shown.set("condition-class", "2")
        assert differs(shown, flow, values_of(flow, **chosen | {"class_": None})) <= 2

        page.evaluate(LATER)
        page.get_by_label("Any Petal length").check()
        shown.wait()
        chosen |= {"class_": None, "petal_length": None}
        assert differs(shown, flow, values_of(flow, **chosen)) <= 2
        shown.page.evaluate(LATER)
        page.get_by_role("button", name="Example").click()
        shown.wait()
        chosen["text"] = EXAMPLES[1]
        assert page.get_by_label("Text", exact=True).input_value() == EXAMPLES[1]
        shown.set("guidance", 2.5)
        assert differs(shown, flow, values_of(flow, **chosen), guidance=Guidance(2.5)) <= 2


def test_a_text_is_encoded_by_a_pretrained_encoder(tmp_path: Path, browser: Any) -> None:
    """The network attends to its tokens, of which some texts have more and some have fewer than it takes."""
    encoder = tiny_encoder(tmp_path / "encoder")
    caption = Caption(encoder, encoder.size, 6, EXAMPLES)
    flow = RectifiedFlow(unet_with(text=caption), space=Pixels(SHAPE))
    with page_of(flow, tmp_path, browser) as shown:
        shown.open()
        assert differs(shown, flow, values_of(flow, text=EXAMPLES[0])) <= 2
        for text in ("A cat.", "The red, blue flowers and the two dogs in the red flower, and a cat!", "unseen"):
            shown.page.evaluate(LATER)
            shown.page.get_by_label("Text", exact=True).fill(text)
            shown.wait()
            assert differs(shown, flow, values_of(flow, text=text)) <= 2
        assert shown.page.inner_text("#condition-text-note") == ""


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


def test_a_link_between_two_seeds(browser: Any, rectified: Page) -> None:
    with looking_at(browser, rectified.address) as shown:
        shown.open()
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
        for name, content in finished(page_sources(), description | {"changed": True}, program).items():
            (rectified.folder / name).write_bytes(content)
        shown.page.reload()
        shown.wait()
        wait_for("the new version", lambda: shown.page.evaluate(kept) != version)
        wait_for("one version", lambda: "," not in shown.page.evaluate(kept))
