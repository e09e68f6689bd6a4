"""Tests of the studio in a browser, with tiny runs of the real program."""

import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rectified_flow.studio import jobs
from tests.patience import PATIENCE, wait_for

pytestmark = pytest.mark.page
TINY = {"image_size": "8", "dim": "8", "dim_mults": "1", "batch_size": "8", "train_num_steps": "20", "num_samples": "4"}
TINY |= {"sample_steps": "2", "sample_every": "10", "save_every": "10", "log_every": "5", "lr_warmup_steps": "2"}
HOSTILE = "<img src=x onerror=alert(1)>"
TABS = ("Pictures", "Time", "Watch", "Play", "Take away")


@contextmanager
def started(runs: Path, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start the studio in a process of its own, and return its address; what it has started outlives it."""
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rectified_flow", "studio", str(runs), "--no_open", "--port", str(port), *flags]
    studio = subprocess.Popen(command, cwd=runs.parent, env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < until
                assert studio.poll() is None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/", studio
    finally:
        studio.kill()
        studio.wait()
        for job in jobs.jobs(runs):
            job.stop()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """Open the page; at the end nothing has gone wrong there, and nothing was asked of other hosts."""
    page = browser.new_page(**options)
    page.set_default_timeout(PATIENCE * 200)
    problems, outside = list[str](), list[str]()
    own = (address, "data:", "blob:")
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on("request", lambda request: outside.append(request.url) if not request.url.startswith(own) else None)
    page.goto(address)
    page.get_by_role("tab", name="Take away").wait_for()
    yield page
    page.close()
    assert (problems, outside) == ([], [])


def go(page: Any, tab: str) -> None:
    page.get_by_role("tab", name=tab, exact=True).click()


def make_tiny(page: Any, **more: str) -> None:
    """Fill the further settings, so that a run takes seconds."""
    go(page, "Time")
    page.get_by_role("button", name="Further settings").click()
    page.locator("#further button.label-wrap").nth(1).wait_for()  # the groups are shown a moment later
    for group in page.locator("#further button.label-wrap").all()[1:]:
        group.click()
    for name, text in (TINY | more).items():
        field = page.locator(f"#set-{name} textarea, #set-{name} input").first
        field.fill(text)
        field.blur()
    go(page, "Pictures")


def zipped(path: Path, *classes: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for shade, name in enumerate(classes):
            for number in range(8):
                content = BytesIO()
                Image.new("RGB", (12, 12), (90 * shade, 20 * number, 99)).save(content, "PNG")
                archive.writestr(f"{name}/{number}.png", content.getvalue())
    return path


def drop(page: Any, *files: Path) -> None:
    page.set_input_files("#drop input[type=file]", list(files))


def violations(page: Any) -> list[tuple[str, str]]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]


def test_the_way_from_dropped_pictures_to_the_opened_page(browser: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with started(runs) as (address, _), opened(browser, address) as page:
        make_tiny(page)
        drop(page, zipped(tmp_path / "pets.zip", "cat", HOSTILE.replace("/", "")))
        page.wait_for_selector("text=16 pictures to train on")
        page.get_by_label("class: ").check()
        page.click("#next")
        page.wait_for_selector("pre:has-text('--use_cfg')")
        page.click("#start")
        page.wait_for_selector("text=The generator is ready")
        with opened(browser, address, viewport={"width": 390, "height": 844}) as phone:
            for tab in TABS:
                go(phone, tab)
                phone.wait_for_timeout(200)
                assert violations(phone) == [], tab
                assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            go(phone, "Watch")
            phone.wait_for_selector("text=The generator is ready")
        page.click("#to-play")
        page.get_by_label("labels", exact=True).click()
        page.get_by_role("option", name="cat").click()
        page.click("#draw")
        page.wait_for_selector("#gallery img")
        assert "labels=cat" in jobs.jobs(runs, "draw")[0].words
        go(page, "Take away")
        page.click("#make-page")
        link = page.get_by_role("link", name="Open the page")
        with browser.new_page() as shown:
            shown.goto(address + link.get_attribute("href"))
            shown.wait_for_selector("#pictures canvas")
        with page.expect_download() as download:
            page.click("#zip-page")
        assert "index.html" in zipfile.ZipFile(download.value.path()).namelist()


def test_a_training_outlives_the_studio_and_is_stopped_and_continued(browser: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with started(runs) as (address, studio):
        with opened(browser, address) as page:
            make_tiny(page, train_num_steps="100000")
            drop(page, zipped(tmp_path / "pets.zip", "cat"))
            page.click("#next")
            page.click("#start")
            page.wait_for_selector("text=/Step [0-9,]+ of/")
            go(page, "Time")
            page.click("#start")
            page.wait_for_selector("text=There is a run called pets")
            studio.kill()
        with started(runs) as (new_address, _), opened(browser, new_address) as page:
            page.wait_for_selector("text=/Step [1-9][0-9,]* of 100,000/")
            page.click("#stop")
            page.wait_for_selector("text=/Step [1-9][0-9,]* of 100,000 is saved/")
            [job] = jobs.jobs(runs, "train")
            assert job.code == 0
            page.click("#resume")
            page.wait_for_selector("#stop")
            page.click("#stop")
            page.wait_for_selector("#resume")
    assert len(jobs.jobs(runs, "train")) == 2


def test_what_is_wrong_is_a_sentence_before_anything_starts(browser: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    broken = tmp_path / "broken.zip"
    broken.write_bytes(b"PK\x03\x04")
    with started(runs) as (address, _), opened(browser, address) as page:
        drop(page, broken)
        page.wait_for_selector("text=/broken.zip cannot be unpacked .* make the zip again/")
        page.get_by_label("Or name a folder on this machine").fill(f"/nowhere/{HOSTILE}")
        page.get_by_role("button", name="Use this folder").click()
        page.wait_for_selector("text=/is not a folder on this machine/")
        (tmp_path / HOSTILE.replace("/", "")).mkdir()
        page.get_by_label("Or name a folder on this machine").fill(str(tmp_path / HOSTILE))
        page.get_by_role("button", name="Use this folder").click()
        page.wait_for_selector("text=/holds no pictures/")
        for outside in (broken, Path("/etc/hostname")):
            assert page.request.get(f"{address}gradio_api/file={outside}").status == 403
        assert page.request.get(f"{address}gradio_api/info").json()["named_endpoints"] == {}
    assert not [job for job in jobs.jobs(runs) if job.kind == "train"]


def test_a_password_is_asked_for(browser: Any, tmp_path: Path) -> None:
    with started(tmp_path / "runs", "--password", "secret") as (address, _):
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("input[type=password]")
        assert not page.query_selector("text=Try it with drawn flowers")
        page.close()


def train(runs: Path, name: str, pictures: Path, *flags: str) -> None:
    """Train a tiny run in a terminal."""
    tiny = [word for flag, value in TINY.items() for word in (f"--{flag}", value)]
    places = ["--dataset_path", str(pictures), "--output_dir", str(runs / name)]
    subprocess.run([sys.executable, "-m", "rectified_flow", "train", *places, *tiny, *flags], check=True)


def drawn(runs: Path, name: str) -> jobs.Job:
    """Wait for the end of the newest drawing of a run, and return its job."""
    until = time.monotonic() + PATIENCE
    while (job := jobs.newest(runs, "draw", name)) is None or job.is_busy:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert job.code == 0, job.output
    return job


def press_until(page: Any, done: Callable[[], object]) -> None:
    """Ask for the painted part until what is on the canvas has reached the studio, which takes a moment."""

    def pressed() -> object:
        page.click("#fill")
        page.wait_for_timeout(2000)
        return done()

    wait_for("the canvas", pressed)


def test_the_painted_part_of_a_picture_is_generated(browser: Any, tmp_path: Path) -> None:
    runs, pictures = tmp_path / "runs", tmp_path / "pictures"
    pictures.mkdir()
    for number in range(8):
        Image.new("RGB", (400, 300), (20 * number, 99, 0)).save(pictures / f"{number}.png")
    train(runs, "pets", pictures)
    with started(runs) as (address, _), opened(browser, address) as page:
        page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 6})
        go(page, "Play")
        page.wait_for_selector("#draw")
        assert page.locator("#paint").count() == 0, "a canvas that is made in a closed accordion may keep a size of 0"
        page.get_by_role("button", name="Change a part of a picture").click()
        page.locator("#paint canvas").first.wait_for()  # the button below it moves
        press_until(page, lambda: page.query_selector("text=Drop a picture here first"))
        page.set_input_files("#paint input[type=file]", [pictures / "7.png"])
        page.locator("#paint button.highlight[aria-label=Brush]").wait_for()
        press_until(page, lambda: page.query_selector("text=Paint over a part of the picture first"))
        box = page.locator("#paint canvas").first.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 9, y + 5, steps=4)
        page.mouse.up()
        press_until(page, lambda: jobs.newest(runs, "draw", "pets"))
        job = drawn(runs, "pets")
        page.wait_for_selector("#gallery img")
    words = job.words
    mask = Image.open(words[words.index("--mask") + 1])
    assert mask.size == (400, 300)
    assert 0 < int((np.asarray(mask) > 127).sum()) < 400 * 300 / 2


def test_a_caption_is_written_and_measurements_are_shown_with_their_scale(browser: Any, tmp_path: Path) -> None:
    runs, pictures, fields = tmp_path / "runs", tmp_path / "pictures", tmp_path / "fields"
    pictures.mkdir()
    fields.mkdir()
    for number in range(8):
        Image.new("RGB", (12, 12), (20 * number, 99, 0)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a cat" if number % 2 else "a red dog")
        np.save(fields / f"{number}.npy", np.random.default_rng(number).normal(size=(12, 12)).astype(np.float32))
    train(runs, "pets", pictures, "--condition_on", "text=caption")
    train(runs, "fields", fields)
    with started(runs) as (address, _), opened(browser, address) as page:
        go(page, "Play")
        page.wait_for_selector("#draw")
        page.click("#draw")
        drawn(runs, "fields")
        page.wait_for_selector("#gallery img[src*=grid]")
        page.get_by_label("Run", exact=True).click()
        page.get_by_role("option", name="pets").click()
        page.get_by_label("text", exact=True).fill("a red dog")
        page.click("#draw")
        words = drawn(runs, "pets").words
    assert words[words.index("--prompt") + 1] == "a red dog"


def test_pictures_are_added_and_a_broken_one_is_skipped(browser: Any, tmp_path: Path) -> None:
    runs, broken = tmp_path / "runs", tmp_path / "broken.png"
    broken.write_text("no picture")
    with started(runs) as (address, _), opened(browser, address) as page:
        make_tiny(page)
        drop(page, zipped(tmp_path / "pets.zip", "cat"))
        page.wait_for_selector("text=8 pictures to train on")
        drop(page, zipped(tmp_path / "more.zip", "dog"), broken)
        page.wait_for_selector("text=16 pictures to train on")
        page.wait_for_selector("text=/skipped 1 broken image; the first is .*broken.png/")
        go(page, "Time")
        page.get_by_label("number input for Minutes to train").fill("20")
        page.get_by_label("Name of the run").click()
        page.wait_for_timeout(100)
        assert page.is_enabled("#start")
        page.locator(".card:visible", has_text="Planning anew").wait_for()
        assert page.is_enabled("#start")
        go(page, "Pictures")
        page.click("#anew")
        page.wait_for_selector("text=16 pictures to train on", state="hidden")
        page.wait_for_selector("#next", state="hidden")


def test_a_large_zip_is_unpacked(browser: Any, tmp_path: Path) -> None:
    runs, large = tmp_path / "runs", zipped(tmp_path / "pets.zip", "cat")
    with zipfile.ZipFile(large, "a") as archive:
        for number in range(200):
            archive.writestr(f"more/{number}.txt", os.urandom(2**20))
    with started(runs) as (address, _), opened(browser, address) as page:
        drop(page, large)
        page.wait_for_selector("text=8 pictures to train on")
