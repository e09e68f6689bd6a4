"""Tests of an exported page with a visitor's picture, by keyboard, and by the Web Content Accessibility Guidelines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rectified_flow.condition import Labels, Picture
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.pixels import Pixels
from tests.export.browser import UNNAMED, Shown, export_page, looking_at, serving
from tests.patience import wait_for
from tests.programs import call
from tests.tiny_flows import flow_with_conditions, unet_with

pytestmark = pytest.mark.page
SHAPE = (3, 8, 8)
BEFORE = """() => {
  const canvas = document.getElementById("before");
  return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
}"""
PASTE = """async (name) => {
  const data = new DataTransfer();
  data.items.add(new File([await (await fetch(name)).blob()], name, { type: "image/png" }));
  dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
}"""


@contextmanager
def exported(flow: Flow, folder: Path, browser: Any, degrade: str | None = None) -> Iterator[Shown]:
    """Show the page of a flow, which is not waited for, with the picture given.png of a visitor beside it."""
    page = export_page(flow, folder, degrade)
    pixels = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(page / "given.png")
    with serving(page) as address, looking_at(browser, address) as shown:
        shown.page.goto(address)
        yield shown


def sampled(folder: Path) -> np.ndarray:
    """Return what sample.py makes of given.png."""
    given = folder / "exported/given.png"
    call("sample.py", "--checkpoint", folder, "--output_dir", folder / "made", "--from_images", given)
    return np.array(Image.open(folder / "made/given.png")).astype(int)


def given(folder: Path) -> np.ndarray:
    return np.array(Image.open(folder / "exported/given.png")).astype(int)


def before(shown: Shown) -> np.ndarray:
    """The picture on the left, with what is painted over it."""
    return np.array(shown.page.evaluate(BEFORE)).reshape(8, 8, 4)[..., :3]


def paint(shown: Shown, frame: str) -> None:
    """Paint from the middle to the right with the mouse, and wait for the pictures."""
    shown.page.locator(f"{frame} .frame").scroll_into_view_if_needed()
    box = shown.page.locator(f"{frame} .frame").bounding_box()
    shown.page.evaluate("document.body.dataset.drawn = ''")
    shown.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.4 * box["height"])
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.4 * box["height"], steps=3)
    shown.page.mouse.up()
    shown.wait()


def test_a_picture_is_degraded_and_translated(tmp_path: Path, browser: Any) -> None:
    """The page asks for a picture first. The visitor drops or pastes the picture."""
    flow = RectifiedFlow(unet_with(), space=Pixels(SHAPE), from_source=True, source_noise=0.25)
    with exported(flow, tmp_path, browser, "downsample:2") as shown:
        page, file = shown.page, tmp_path / "exported/given.png"
        wait_for("the page", page.locator("#call").is_visible)
        assert page.locator("#controls").is_hidden()
        assert (page.title(), page.inner_text("#call h2")) == ("Details for small pictures", "Drop a picture here")
        assert page.evaluate(UNNAMED) == []
        shown.drop(file)
        shown.wait()
        assert page.locator("#call").is_hidden()
        assert page.evaluate(UNNAMED) == []
        first = shown.picture()
        assert np.abs(first - sampled(tmp_path)).max() <= 2
        shrunk = given(tmp_path).reshape(4, 2, 4, 2, 3).mean(axis=(1, 3)).repeat(2, axis=0).repeat(2, axis=1)
        assert np.abs(before(shown) - shrunk).max() <= 1
        assert page.locator("#level").is_hidden()
        assert page.locator("#brush").is_hidden(), "only a part of a picture is painted over"
        shown.set("seed", 3)
        assert not np.array_equal(shown.picture(), first)
        page.keyboard.press("Escape")
        wait_for("the first view", page.locator("#call").is_visible)
        page.evaluate(PASTE, "given.png")
        shown.wait("document.getElementById('call').hidden")
        shown.set("seed", 0)
        assert np.array_equal(shown.picture(), first)


def test_before_and_after_by_keyboard_and_side_by_side(tmp_path: Path, browser: Any) -> None:
    """A flow without noise has one result, and no seed."""
    flow = MeanFlow(unet_with(), space=Pixels(SHAPE), from_source=True)
    with exported(flow, tmp_path, browser) as shown:
        page = shown.page
        wait_for("the page", page.locator("#call").is_visible)
        page.set_input_files("#file", tmp_path / "exported/given.png")
        shown.wait()
        assert np.abs(shown.picture() - sampled(tmp_path)).max() <= 2
        assert page.locator("#pictures canvas").count() == 1
        assert page.locator("#seed").is_hidden()
        assert np.array_equal(before(shown), given(tmp_path))
        assert page.locator("#given").is_hidden(), "no room on a phone"
        line = "getComputedStyle(document.getElementById('after')).clipPath"
        assert page.evaluate(line) == "inset(0px 0px 0px 50%)"
        page.focus("#split")
        page.keyboard.press("ArrowRight")
        assert page.evaluate(line) == "inset(0px 0px 0px 51%)"
        page.set_viewport_size({"width": 1200, "height": 900})
        left, right = (page.locator(f"{name} .frame").bounding_box() for name in ("#given", "#compare"))
        assert left["y"] == right["y"]
        assert left["x"] + left["width"] < right["x"]
        page.mouse.click(right["x"] + 0.25 * right["width"], right["y"] + 20)
        assert page.input_value("#split") == "25"


def test_a_part_is_painted_over_and_the_rest_is_kept(tmp_path: Path, browser: Any) -> None:
    """The source is a condition beside the classes, and a map draws sixteen results at once."""
    network = unet_with(labels=Labels(2, ("cat", "dog")), source=Picture(SHAPE))
    flow = MeanFlow(network, space=Pixels(SHAPE))
    with exported(flow, tmp_path, browser, "mask:box") as shown:
        page = shown.page
        wait_for("the page", page.locator("#call").is_visible)
        shown.drop(tmp_path / "exported/given.png")
        wait_for("the brush", page.locator("#brush").is_visible)
        assert shown.text("status") == "The model is ready."
        assert page.evaluate("document.body.dataset.drawn") == ""
        page.set_viewport_size({"width": 1200, "height": 900})
        paint(shown, "#given")
        page.set_viewport_size({"width": 390, "height": 844})
        mask = (before(shown) != given(tmp_path)).any(axis=2)
        assert 4 < mask.sum() < 40
        assert mask[3, 5]
        for number in range(16):
            assert np.array_equal(shown.picture(number)[~mask], given(tmp_path)[~mask]), "to the bit"
        assert not np.array_equal(shown.picture(0), shown.picture(1))
        page.click("#pictures button:nth-child(3)")
        assert page.get_attribute("#pictures button:nth-child(3)", "aria-pressed") == "true"
        assert page.evaluate(UNNAMED) == []
        page.click("#clear")
        wait_for("a new start", lambda: shown.text("status") == "The model is ready.")
        assert np.array_equal(before(shown), given(tmp_path))


SHAPE = (3, 8, 8)
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], "resultTypes": ["violations", "passes"]}
CHECKED = {"color-contrast", "label", "target-size"}
"""Some of the rules, which find something to check on every page."""
WIDTHS = (360, 1280)
FOCUSED = """() => {
  const focused = document.activeElement;
  const shown = focused.type === "file" ? focused.nextElementSibling : focused;
  return [focused.id || focused.innerText, getComputedStyle(shown).outlineStyle];
}"""
"""The focused control, and the line around what the visitor sees of it."""
CONTROLS = """() => [...document.querySelectorAll("a, input, select, button, summary")]
  .filter((each) => each.checkVisibility() && !each.disabled).map((each) => each.id || each.innerText)"""


FLOWS: dict[str, Callable[[], Flow]] = {
    "of noise": flow_with_conditions,
    "of one step": lambda: MeanFlow(unet_with(), space=Pixels(SHAPE)),
    "from a picture": lambda: RectifiedFlow(unet_with(), space=Pixels(SHAPE), from_source=True, source_noise=0.25),
    "of a mask": lambda: MeanFlow(unet_with(source=Picture(SHAPE)), space=Pixels(SHAPE)),
}
DEGRADE = {"of a mask": "mask:box"}
"""The flag with which the flow of this name was trained."""


def check(shown: Shown) -> None:
    """Check the page as it is, in both colour schemes, on a phone and on a wide screen."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            shown.page.emulate_media(color_scheme=scheme)
            shown.page.set_viewport_size({"width": width, "height": 900})
            results = axe.Axe().run(shown.page, options=RULES)
            assert results.response["violations"] == [], f"{scheme}, {width} px: {results.generate_report()}"
            assert {rule["id"] for rule in results.response["passes"]} >= CHECKED
            assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", FLOWS)
def test_a_page_violates_no_guideline(name: str, tmp_path: Path, browser: Any) -> None:
    """Check the first view, which may ask for a picture, and the view of a picture."""
    with exported(FLOWS[name](), tmp_path, browser, DEGRADE.get(name)) as shown:
        if name in ("of noise", "of one step"):
            shown.wait()
        else:
            wait_for("the page", shown.page.locator("#call").is_visible)
        check(shown)
        shown.page.set_input_files("#file", tmp_path / "exported/given.png")
        wait_for("the picture", shown.page.locator("#views").is_visible)
        check(shown)


def reached(shown: Shown) -> dict[str, str]:
    """The controls that the Tab key leads to, each with the style of the line around it."""
    shown.page.evaluate("document.activeElement.blur()")
    found: dict[str, str] = {}
    while True:
        shown.page.keyboard.press("Tab")
        name, style = shown.page.evaluate(FOCUSED)
        if name in found or shown.page.evaluate("document.activeElement === document.body"):
            return found
        found[name] = style


def test_the_tab_key_leads_to_every_control_and_shows_where_it_is(tmp_path: Path, browser: Any) -> None:
    with exported(flow_with_conditions(), tmp_path, browser) as shown:
        shown.wait()
        for _view in ("from noise", "of a picture"):
            found = reached(shown)
            assert set(found) == set(shown.page.evaluate(CONTROLS))
            assert "none" not in found.values()
            shown.page.set_input_files("#file", tmp_path / "exported/given.png")
            shown.wait("!document.getElementById('views').hidden")


def test_a_part_is_painted_over_by_keyboard(tmp_path: Path, browser: Any) -> None:
    with exported(FLOWS["of a mask"](), tmp_path, browser, DEGRADE["of a mask"]) as shown:
        page = shown.page
        wait_for("the page", page.locator("#call").is_visible)
        page.set_input_files("#file", tmp_path / "exported/given.png")
        wait_for("the brush", page.locator("#brush").is_visible)
        page.focus("#brush")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "paint-here"
        assert page.locator("#paint-here").bounding_box()["height"] >= 24
        seed = page.input_value("#seed")
        for key in (*["ArrowRight"] * 6, *["ArrowUp"] * 20):
            page.keyboard.press(key)
        assert page.input_value("#seed") == seed, "the arrow keys move the brush"
        page.keyboard.press("Space")
        shown.wait()
        changed = (before(shown) != given(tmp_path)).any(axis=2)
        assert changed[0, 6]
        assert not changed[1:].any()
        assert not changed[:, :6].any()
        assert page.evaluate("document.activeElement.id") == "paint-here"
