"""How much slower is a training while the page of the studio shows it in a browser?

A run trains on drawn flowers. In turns, its page is closed and open at the tab Watch, in headless Chromium on the same
machine. Needs the extra ``studio``, playwright and chromium (``make test-page``).
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

RUN = "flowers"
TRAINING = "--dataset synthetic-flowers --image_size 32 --dim 32 --batch_size 32 --train_num_steps 100000 --log_every 2"
SETTLED = 5.0  # time after a change of the page that is not measured [s]


@dataclass(frozen=True)
class Config:
    """All flags of the program."""

    turns: int = 6
    """Number of turns with the page, and as many without it."""
    seconds: float = 20.0
    """Measured time of a turn [s]."""


def images_seen(run: Path) -> tuple[int, float]:
    """Return the number of images in the newest line of the metrics, and when this line was written [s since 1970]."""
    file = run / "metrics.jsonl"
    return json.loads(file.read_text().splitlines()[-1])["images_seen"], file.stat().st_mtime


def speed(run: Path, seconds: float) -> float:
    """Return the images per second of a run that trains, in the next ``seconds``."""
    time.sleep(SETTLED)
    first, began = images_seen(run)
    time.sleep(seconds)
    last, ended = images_seen(run)
    return (last - first) / (ended - began)


def measure(config: Config, folder: Path, browser: Any) -> None:
    """Train, show the run in turns, and print the ratio of the speeds and the processor time of the studio."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, runs = [sys.executable, "-m", "rectified_flow"], folder / "runs"
    words = [*TRAINING.split(), "--output_dir", str(runs / RUN), "--cache_dir", str(folder / "cache")]
    quiet: Any = {"cwd": os.getcwd(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    training = subprocess.Popen(["nice", *program, "train", *words], **quiet)  # as the studio starts it
    studio = subprocess.Popen([*program, "studio", str(runs), "--no_open", "--port", str(port)], **quiet)
    try:
        while not (runs / RUN / "metrics.jsonl").exists():
            time.sleep(1)
        ratios, shares = list[float](), list[float]()
        for _ in range(config.turns):
            closed = speed(runs / RUN, config.seconds)
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            page.get_by_role("tab", name="Watch", exact=True).click()
            used, began = sum(psutil.Process(studio.pid).cpu_times()[:2]), time.monotonic()
            ratios.append(speed(runs / RUN, config.seconds) / closed)
            shares.append((sum(psutil.Process(studio.pid).cpu_times()[:2]) - used) / (time.monotonic() - began))
            page.close()
            print(
                f"{ratios[-1]:.3f} of the speed without the page; the studio uses {shares[-1]:.1%} of a core",
                flush=True,
            )
    finally:
        training.kill()
        studio.kill()
    low, high = min(ratios), max(ratios)
    print(f"median {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}], {statistics.median(shares):.1%} of a core")


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as started:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        measure(tyro.cli(Config), Path(temporary), browser)
