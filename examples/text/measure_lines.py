"""Measure how fast a large text is opened, and the memory of processes that read it at once.

A text is made in a folder, indexed, and opened in a new process. Then several processes read random lines. Their unique
memory is measured while all of them hold their files open. With --table, the table of the library datasets is measured,
too. Needs Linux, and room for the text and its index.
"""

import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from line_store import LineStore, open_lines
from line_table import LineTable

WORDS = ("sun", "moon", "cloud", "rain", "river", "stone", "tree", "leaf", "bird", "fish", "house", "road", "hill")
START_METHODS = ("fork", "forkserver", "spawn")
Rows = dict[str, str]
"""Measured values in words, by their names."""


@dataclass(frozen=True)
class Flags:
    """The flags of this program."""

    folder: Path
    """Folder for the text and the caches."""
    lines: int = 15_000_000
    """Lines of the text, of some 109 bytes each."""
    processes: int = 8
    """Processes that read at once."""
    reads: int = 20_000
    """Random lines that each process reads."""
    table: bool = False
    """Measure the table of the library datasets, too."""


Lines = LineStore | LineTable
Open = Callable[[Path, Path], Lines]


def open_index(path: Path, cache_dir: Path) -> LineStore:
    """Open a text with an index in a cache."""
    return open_lines([path], cache_dir=cache_dir)


def make_text(path: Path, lines: int) -> None:
    """Write lines of 12 to 26 words, each of which starts with its number."""
    draw = np.random.default_rng(0)
    some = [" ".join(draw.choice(WORDS, size)) for size in draw.integers(12, 27, 1000)]
    with path.open("w") as file:
        for first in range(0, lines, len(some)):
            file.writelines(f"{first + index} {line}\n" for index, line in enumerate(some[: lines - first]))


def own_memory() -> int:
    """Return the memory that belongs to this process alone [bytes]."""
    return int(psutil.Process().memory_full_info().uss)


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended children [s]."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def build(opened: Open, path: Path, cache_dir: Path) -> Rows:
    """Measure the first opening, which prepares the text."""
    began, used = time.perf_counter(), processor_seconds()
    count = len(opened(path, cache_dir))
    seconds, used = time.perf_counter() - began, processor_seconds() - used
    disk = sum(each.stat().st_size for each in cache_dir.rglob("*") if each.is_file())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "lines": f"{count:,}",
        "first opening": f"{seconds:.1f} s, {used:.1f} s of processor time",
        "disk for it": f"{disk / 1e6:,.0f} MB",
        "peak memory of the first opening": f"{peak / 1e6:,.0f} MB",
    }


def reopen(opened: Open, path: Path, cache_dir: Path) -> Rows:
    """Measure a later opening in a new process, the items and the pickle."""
    began = time.perf_counter()
    store = opened(path, cache_dir)
    count = len(store)
    opening = time.perf_counter() - began
    length, before = timed(lambda: len(store)), len(pickle.dumps(store))
    numbers = np.random.default_rng(0).integers(0, count, 10_001).tolist()
    first = timed(lambda: store[numbers[0]])
    random = timed(lambda: [store[number] for number in numbers[1:]]) / 10_000
    return {
        "later opening": f"{1e3 * opening:.1f} ms",
        "length": f"{1e6 * length:.1f} µs",
        "first line": f"{1e3 * first:.2f} ms",
        "random line": f"{1e6 * random:.1f} µs",
        "pickle before and after reading": f"{before:,} and {len(pickle.dumps(store)):,} bytes",
    }


def timed(action: Callable[[], object]) -> float:
    """Return the time that an action takes [s]."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def load(opened: Open, path: Path, cache_dir: Path) -> Rows:
    """Read lines in two loader processes of each start method."""
    store, numbers = opened(path, cache_dir), [0, 7, 12_345, 99_999]
    rows = Rows()
    for method in START_METHODS:
        expected = [store[number] for number in numbers]  # the store has been read when it is pickled
        loader = DataLoader(store, sampler=numbers, num_workers=2, multiprocessing_context=method)  # type: ignore[arg-type, var-annotated]
        found = list[str]()
        seconds = timed(lambda found=found, loader=loader: found.extend(line for [line] in loader))  # type: ignore[misc]
        rows[f"two loader processes by {method}"] = f"{'same' if found == expected else 'OTHER'} lines, {seconds:.1f} s"
    return rows


def read(opened: Open, path: Path, cache_dir: Path, reads: int, seed: int, ready: Barrier, results: Any) -> None:
    """Read random lines, and send the own memory before and after while all other processes hold their files."""
    store, before = opened(path, cache_dir), own_memory()
    for number in np.random.default_rng(seed).integers(0, len(store), reads).tolist():
        assert store[number].startswith(f"{number} ")
    ready.wait()
    results.put((before, own_memory()))
    ready.wait()


def read_at_once(opened: Open, path: Path, cache_dir: Path, processes: int, reads: int) -> Rows:
    """Measure the memory of processes that read at once."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(processes), context.SimpleQueue()
    arguments = (opened, path, cache_dir, reads)
    readers = [context.Process(target=read, args=(*arguments, seed, ready, results)) for seed in range(processes)]
    for each in readers:
        each.start()
    pairs = [results.get() for _ in readers]
    for each in readers:
        each.join()
    whole = ", ".join(f"{after / 1e6:.0f}" for _, after in pairs)
    more = ", ".join(f"{(after - before) / 1e6:.2f}" for before, after in pairs)
    return {
        f"unique memory of {processes} reading processes": f"{whole} MB",
        "of which for reading": f"{more} MB",
        "files in the page cache": f"{cached_bytes(path, cache_dir) / 1e9:.2f} GB",
    }


def cached_bytes(path: Path, cache_dir: Path) -> int:
    """Return the bytes of a text and of the files of its cache that are in the operating system's page cache."""
    files = [path, *(each for each in cache_dir.rglob("*") if each.is_file() and each.stat().st_size > 0)]
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def in_new_process(function: Callable[..., Rows], *arguments: Any) -> Rows:
    """Return what a function returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(opened: Open, path: Path, cache_dir: Path, flags: Flags) -> Rows:
    """Return all measurements of one way to open a text."""
    cache_dir.mkdir()
    rows = Rows()
    for step in (build, reopen):
        rows |= in_new_process(step, opened, path, cache_dir)
    rows |= load(opened, path, cache_dir)
    return rows | read_at_once(opened, path, cache_dir, flags.processes, flags.reads)


def processor_name() -> str:
    """Return the name of the processor."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else "unknown processor"


def main(flags: Flags) -> None:
    """Print a table of the measurements."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="lines-", dir=flags.folder))
    path = folder / "lines.txt"
    make_text(path, flags.lines)
    ways: dict[str, Open] = {"index": open_index} | ({"table": LineTable} if flags.table else {})
    found = {name: measure(opened, path, folder / name, flags) for name, opened in ways.items()}
    print(f"{flags.lines:,} lines, {path.stat().st_size / 1e9:.2f} GB, {processor_name()}\n")
    print(f"| | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for row in found["index"]:
        print(f"| {row} | {' | '.join(rows[row] for rows in found.values())} |")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
