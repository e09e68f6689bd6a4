"""The page of watch.py in a browser: runs side by side, while they are written to."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rectified_flow.system.pictures import write_picture
from tests.cli.test_watch import served
from tests.patience import PATIENCE
from tests.watched_runs import add, begin_run, metrics, write_status

pytestmark = pytest.mark.page


class Watched:
    """The page, and what it complained of and asked for."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)
        self.wait("document.body.dataset.updates > 0")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < until, condition
            self.page.wait_for_timeout(50)

    def titles(self) -> list[str]:
        return [text.split(",")[0] for text in self.page.locator("figure:visible figcaption").all_inner_texts()]

    def curves(self) -> int:
        return int(self.page.locator("#chart-0 path.curve").count())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begin_run(tmp_path / "runs" / "cats")


@pytest.fixture
def watched(browser: Any, run: Path) -> Iterator[Watched]:
    page = browser.new_page()
    with served(run.parent) as server:
        shown = Watched(page, f"http://127.0.0.1:{server.server_address[1]}/")
        yield shown
        page.close()
    assert shown.problems == []
    assert all(url.startswith((shown.address, "data:")) for url in shown.requests)


def test_a_run_and_what_is_added_to_it(watched: Watched, run: Path) -> None:
    card = watched.page.locator(".run")
    assert card.locator("h2").inner_text() == "cats"
    assert card.locator(".summary").inner_text() == "running, step 30 of 100, 2 min left"
    assert card.locator(".bad").inner_text() == "2 bad steps skipped"
    assert watched.titles()[:3] == [
        "Training loss",
        "The same loss on held-out and training pictures",
        "Gap between the two",
    ]
    add(run, "metrics", metrics(40))
    write_picture(run / "samples" / "step_00000040.png", np.zeros((4, 4, 3), np.uint8))
    watched.wait("document.querySelector('.summary').textContent.includes('step 40')")
    assert card.locator("output").inner_text() == "step 40", "who looks at the newest samples goes on with them"
    card.locator(".samples input").press("ArrowLeft")
    assert card.locator("output").inner_text() == "step 20"
    assert card.locator("img").get_attribute("src") == "samples/0/step_00000020.png"


def test_runs_side_by_side(watched: Watched, run: Path) -> None:
    assert watched.curves() == 1
    other = run.parent / "dogs"
    write_status(other, "failed", message="no memory")
    add(other, "metrics", metrics(10), metrics(20))
    watched.wait("document.querySelectorAll('.run').length === 2")
    watched.wait("document.querySelectorAll('#chart-0 path.curve').length === 2")
    assert watched.page.locator(".run .bad").nth(1).inner_text() == "no memory"
    watched.page.locator(".run input[type=checkbox]").first.uncheck()
    assert watched.curves() == 1
    assert "dogs" not in watched.page.locator("#chart-0 .legend").inner_text(), "a curve alone needs no run's name"


def test_reading_off_smoothing_and_scale(watched: Watched) -> None:
    chart = watched.page.locator("#chart-0")
    chart.locator("svg").hover(position={"x": 60, "y": 60})
    assert chart.locator("figcaption").inner_text() == "Training loss, step 10"
    assert chart.locator(".legend").inner_text().strip() == "loss 0.1"
    watched.page.mouse.move(0, 0)
    before = chart.locator("path").get_attribute("d")
    watched.page.locator("#log").uncheck()
    linear = chart.locator("path").get_attribute("d")
    watched.page.evaluate(
        "() => { const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input')); }"
    )
    assert len({before, linear, chart.locator("path").get_attribute("d")}) == 3


def test_a_curve_that_is_read_off_goes_on(watched: Watched, run: Path) -> None:
    chart = watched.page.locator("#chart-0")
    chart.locator("svg").hover(position={"x": 60, "y": 60})
    before = chart.locator("path").get_attribute("d")
    add(run, "metrics", metrics(40))
    watched.wait(f"document.querySelector('#chart-0 path').getAttribute('d') !== {before!r}")
    assert chart.locator("figcaption").inner_text() == "Training loss, step 10"


def test_reading_off_by_keys(watched: Watched) -> None:
    chart, svg = watched.page.locator("#chart-0"), watched.page.locator("#chart-0 svg")
    for key, legend in {"Home": "loss 0.1", "ArrowRight": "loss 0.05", "End": "loss 0.03333"}.items():
        svg.press(key)
        assert chart.locator(".legend").inner_text().strip() == legend
    svg.press("ArrowLeft")
    assert svg.get_attribute("aria-valuetext") == "step 20: loss 0.05"
    svg.press("Escape")
    assert chart.locator("figcaption").inner_text() == "Training loss"


def test_a_run_that_ended_earlier_is_read_where_it_ended(watched: Watched, run: Path) -> None:
    write_status(run.parent / "dogs", "finished")
    add(run.parent / "dogs", "metrics", metrics(10), metrics(20))
    watched.wait("document.querySelectorAll('#chart-0 path.curve').length === 2")
    watched.page.locator("#chart-0 svg").press("End")
    legend = watched.page.locator("#chart-0 .legend li").all_inner_texts()
    assert legend == ["cats: loss 0.03333", "dogs: loss 0.05 at 20"]


def test_on_a_phone_nothing_sticks_out(watched: Watched) -> None:
    text = "document.querySelector('#chart-0 text').getBoundingClientRect().height"
    size = watched.page.evaluate(text)
    watched.page.set_viewport_size({"width": 360, "height": 700})
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360
    watched.wait(f"Math.abs({text} - {size}) < 1")


def test_a_server_that_ends_is_told(browser: Any, run: Path) -> None:
    page = browser.new_page()
    with served(run) as server:
        shown = Watched(page, f"http://127.0.0.1:{server.server_address[1]}/")
    shown.wait("document.getElementById('status').textContent.includes('does not answer')")
    page.close()
