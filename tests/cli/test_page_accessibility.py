"""Tests of an exported page by the Web Content Accessibility Guidelines, level AA, and by keyboard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.condition import Picture
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.degradations import Mask
from rectified_flow.spaces.pixels import Pixels
from tests.cli.browser import Shown
from tests.cli.test_export import small
from tests.cli.test_page_kept import flow_with_conditions
from tests.cli.test_page_source import before, exported, given
from tests.patience import wait_for

pytestmark = pytest.mark.page
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
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
    "of one step": lambda: MeanFlow(small(), space=Pixels(SHAPE)),
    "from a picture": lambda: RectifiedFlow(small(), space=Pixels(SHAPE), from_source=True, source_noise=0.25),
    "of a mask": lambda: MeanFlow(small(source=Picture(SHAPE)), space=Pixels(SHAPE), degradation=Mask()),
}


def check(shown: Shown) -> None:
    """Check the page as it is, in both colour schemes, on a phone and on a wide screen."""
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
    with exported(FLOWS[name](), tmp_path, browser) as shown:
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
    with exported(FLOWS["of a mask"](), tmp_path, browser) as shown:
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
