"""Training beside other programs: images/s of make demo's run, by how OpenMP's threads wait, alone and beside others.

Each figure is a run of its own. The settings take turns, and the median of the rounds is printed. Some 15 minutes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import tyro

PROJECT = Path(__file__).resolve().parent.parent
RUN = [
    *(sys.executable, "train_oxford.py", "--dataset", "synthetic-flowers", "--image_size", "32", "--dim", "32"),
    *("--dim_mults", "1", "2", "2", "--dropout", "0", "--batch_size", "16", "--train_num_steps", "1000000"),
    *("--sample_every", "0", "--save_every", "0", "--log_every", "1"),
]
SETTINGS = {
    "as the programs set it": {},
    "GNU's own": {"GOMP_SPINCOUNT": "300000"},  # its default where there are no more threads than cores
    "spin count 1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
LOADS = {"alone": (0, 0), "beside 2 niced processes": (2, 19), "beside 2 processes": (2, 0), "beside 10": (10, 0)}
OPENMP = ("OMP_", "GOMP_", "KMP_", "MKL_")
WARM_UP = 4
"""Steps that are not timed."""


def main(rounds: int = 3, seconds: float = 15.0) -> None:
    """Print the table.

    Args:
        rounds: runs of each setting under each load.
        seconds: of each run, from its first steps on.
    """
    rates: dict[tuple[str, str], list[float]] = {each: [] for each in product(LOADS, SETTINGS)}
    with tempfile.TemporaryDirectory() as folder:
        for _, (load, setting) in product(range(rounds), rates):
            count, niceness = LOADS[load]
            with others(count, niceness):
                rates[load, setting].append(images_per_second(SETTINGS[setting], seconds, Path(folder)))
            print(f"{load}, {setting}: {rates[load, setting][-1]:.1f} images/s", file=sys.stderr, flush=True)
    print(f"| images/s, {os.cpu_count()} cores | {' | '.join(SETTINGS)} |\n|{'---|' * (len(SETTINGS) + 1)}")
    for load in LOADS:
        print(f"| {load} | {' | '.join(f'{statistics.median(rates[load, each]):.1f}' for each in SETTINGS)} |")


@contextmanager
def others(count: int, niceness: int) -> Iterator[None]:
    """Processes of one thread that compute all the time."""
    command = ["nice", "-n", str(niceness), sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def images_per_second(setting: dict[str, str], seconds: float, folder: Path) -> float:
    """The rate of a run in ``folder``, by the times at which its first and last lines of metrics appear."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OPENMP)} | setting
    output = tempfile.mkdtemp(dir=folder)
    command = [*RUN, "--output_dir", output, "--cache_dir", str(folder / "cache")]
    run = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = Path(output) / "metrics.jsonl"
        first, began = wait_for_line(metrics, WARM_UP, run)
        time.sleep(seconds)
        last, ended = wait_for_line(metrics, 0, run)
        return images_seen(metrics, last, first) / (ended - began)
    finally:
        run.kill()
        run.wait()


def wait_for_line(metrics: Path, least: int, run: "subprocess.Popen[bytes]") -> tuple[int, float]:
    """The number of lines, at least so many, at the moment at which one of them appears, and that moment."""
    before = None
    while run.poll() is None:
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        if before is not None and lines > before and lines >= least:
            return lines, time.monotonic()
        before = lines
        time.sleep(0.01)
    raise SystemExit("the run ended: start it by hand to see why")


def images_seen(metrics: Path, last: int, first: int) -> int:
    """Images between two lines."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return int(rows[last - 1]["images_seen"] - rows[first - 1]["images_seen"])


if __name__ == "__main__":
    tyro.cli(main)
