"""Open an exported page in a headless Chromium, print its speed, and write a screenshot of it.

``python scripts/try_page.py runs/demo/exported --screenshot page.png`` needs playwright (``pip install playwright``)
and a Chromium in the path. Times are those of an empty cache, and of a folder that is on this machine.
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from rectified_flow.errors import RunError, UsageError
from rectified_flow.system.artifact import claim, write_output
from rectified_flow.system.files import prepare_folder
from rectified_flow.system.serving import serving

PATIENCE = 300.0
"""Time limit of loading the model, of reading a picture, and of one generation [s]."""
DRAWINGS = 10
STROKE = ((0.35, 0.3), (0.6, 0.45), (0.45, 0.6))
"""Corners of the stroke of ``--paint``, as shares of the sides of the picture."""
SOFTWARE_CARD = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")


def wait_until(page: Any, condition: str) -> None:
    """Wait until a condition in JavaScript is true.

    Raises:
        SystemExit: if the page says that it failed, or if it takes too long.
    """
    until = time.monotonic() + PATIENCE
    while not page.evaluate(condition):
        if page.evaluate("document.getElementById('status').className") or time.monotonic() > until:
            raise SystemExit(f"nothing was drawn: {page.inner_text('#status')}")
        page.wait_for_timeout(5)


def wait(page: Any) -> float:
    """Wait for the pictures, and return the seconds that they took, as the page prints them."""
    wait_until(page, "document.body.dataset.drawn")
    return float(page.evaluate("document.body.dataset.seconds"))


def open_page(page: Any, address: str, arguments: argparse.Namespace) -> None:
    """Open the page, give it the picture of ``--picture`` and paint over a part of it, and wait for the result.

    Raises:
        SystemExit: if the page fails, or waits for a picture or for the brush.
    """
    page.goto(address)
    wait_until(page, "!document.getElementById('about').textContent.startsWith('Loading')")
    if arguments.picture is not None:
        page.set_input_files("#file", arguments.picture)
        wait_until(page, "!document.getElementById('views').hidden")  # what was drawn before is now superseded
    if arguments.paint:
        frame = page.locator("#given .frame, #compare .frame").filter(visible=True).first
        frame.scroll_into_view_if_needed()
        box = frame.bounding_box()
        for number, (across, down) in enumerate(STROKE):
            page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"], steps=4)
            if number == 0:
                page.mouse.down()
        page.mouse.up()
    if page.evaluate("document.body.classList.contains('waiting')"):
        raise SystemExit(f"this model needs {'--paint' if arguments.picture else 'a picture: --picture'}")
    wait(page)


def set_seed(page: Any, seed: int) -> None:
    """Set the seed, which is hidden if it changes nothing."""
    script = "seed => { const each = document.getElementById('seed'); each.value = seed; each.oninput(); }"
    page.evaluate(script, str(seed))


def measure(browser: Any, address: str, arguments: argparse.Namespace) -> None:
    """Print the time from the address to the first picture, and the median rate over other seeds."""
    page = browser.new_page(service_workers="block")  # else it fetches all files again
    began = time.monotonic()
    open_page(page, address, arguments)
    first = time.monotonic() - began
    seconds = []
    for seed in range(1, DRAWINGS + 1):
        set_seed(page, seed)
        seconds.append(wait(page))
    count, steps = page.locator("#pictures canvas").count(), page.input_value("#steps")
    drawing = statistics.median(seconds)
    print(f"first picture after {first:.2f} s, then {drawing:.3f} s for {count} at once in {steps} steps", end="")
    print(f": {count / drawing:.2f} pictures a second")
    print(page.inner_text("#backend"))
    page.close()


def photograph(browser: Any, address: str, arguments: argparse.Namespace) -> None:
    """Write a screenshot of the whole page."""
    viewport = {"width": arguments.width, "height": 800}
    how = {"color_scheme": arguments.scheme, "device_scale_factor": arguments.scale, "service_workers": "block"}
    page = browser.new_page(viewport=viewport, **how)
    open_page(page, address, arguments)
    set_seed(page, arguments.seed)
    wait(page)
    page.evaluate("document.activeElement.blur()")
    write_output(arguments.screenshot, page.screenshot(full_page=True))
    page.close()


def main() -> None:
    """Measure the page and write the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that export.py --format page wrote")
    parser.add_argument("--backend", choices=("wasm", "webgpu"), help="draw with this one; the page chooses without it")
    parser.add_argument("--software_card", action="store_true", help="give Chromium a graphics card made of software")
    parser.add_argument("--screenshot", type=Path, help="file for a screenshot, PNG")
    parser.add_argument("--picture", type=Path, help="picture to give to the page, which a model of pictures needs")
    parser.add_argument("--paint", action="store_true", help="paint over a part of --picture")
    parser.add_argument("--width", type=int, default=1000, help="of the screenshot, 390 for a phone's")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light", help="colours of the screenshot")
    parser.add_argument("--scale", type=float, default=1, help="pixels of the screenshot for a pixel of the page")
    parser.add_argument("--seed", type=int, default=1, help="of the pictures in the screenshot")
    arguments = parser.parse_args()
    if arguments.paint and arguments.picture is None:
        parser.error("--paint paints over the picture of --picture, which is missing")
    if arguments.screenshot is not None:
        try:
            claim(prepare_folder("screenshot", arguments.screenshot.parent), [arguments.screenshot.name])
        except (UsageError, RunError) as error:
            parser.error(str(error))
    flags = ["--no-sandbox", *SOFTWARE_CARD * arguments.software_card]
    with serving(arguments.folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        query = f"?backend={arguments.backend}" if arguments.backend else ""
        measure(browser, address + query, arguments)
        if arguments.screenshot is not None:
            photograph(browser, address + query, arguments)
        browser.close()


if __name__ == "__main__":
    main()
