"""Reading lines of a large text: an index on the disk beside a list of lines in every process.

A text is made, indexed, opened and read in the same places by several processes at once. Printed are the speed of
indexing, the time to open, the size of a pickle, and the memory that belongs to each process alone: with the index, and
with `readlines()` in one process. Needs Linux, and a disk with room for the text.
"""

import gc
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from line_store import LineStore, open_lines

WORDS = (
    "sun",
    "moon",
    "star",
    "cloud",
    "rain",
    "river",
    "stone",
    "tree",
    "leaf",
    "bird",
    "fish",
    "house",
    "road",
    "hill",
)


@dataclass(frozen=True)
class Flags:
    """The flags of this program."""

    lines: int = 15_000_000
    """Lines of the text, of some 100 bytes each."""
    processes: int = 8
    """Processes that read at once."""
    reads: int = 20_000
    """Lines that each process reads."""
    folder: Path = Path(tempfile.gettempdir())
    """Folder for the text."""


def make_text(path: Path, lines: int) -> None:
    """Write lines of 12 to 26 words."""
    draw = np.random.default_rng(0)
    some = [" ".join(draw.choice(WORDS, size)) for size in draw.integers(12, 27, 1000)]
    with path.open("w") as file:
        for first in range(0, lines, len(some)):
            file.writelines(f"{first + index} {line}\n" for index, line in enumerate(some[: lines - first]))


def own_memory() -> int:
    """Return the memory that belongs to this process alone [bytes]."""
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def read(store: LineStore, reads: int, ready: Barrier, results: Any) -> None:
    """Read lines from all over the text, and send how much memory that took while all other readers hold theirs."""
    before = own_memory()
    for number in np.linspace(0, len(store) - 1, reads, dtype=np.int64):
        assert store[number].startswith(str(number))
    ready.wait()
    results.put(own_memory() - before)
    ready.wait()


def read_list(path: Path, results: Any) -> None:
    """Read the text as a Python list, and send how much memory that took."""
    before = own_memory()
    lines = path.read_text().splitlines()
    results.put(own_memory() - before)
    del lines


def memory_of_readers(store: LineStore, processes: int, reads: int) -> list[int]:
    """Return the memory that reading takes in each of several processes alone [bytes]."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(processes), context.SimpleQueue()
    readers = [context.Process(target=read, args=(store, reads, ready, results)) for _ in range(processes)]
    for each in readers:
        each.start()
    found = [results.get() for _ in readers]
    for each in readers:
        each.join()
    return found


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time that ``action`` took [s], and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def main(flags: Flags) -> None:
    """Print the time and the memory of both ways to read."""
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        path = Path(folder) / "lines.txt"
        make_text(path, flags.lines)
        size = path.stat().st_size
        building, _ = timed(lambda: open_lines(path))
        opening, store = timed(lambda: open_lines(path))
        readers = memory_of_readers(store, flags.processes, flags.reads)
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        lister = context.Process(target=read_list, args=(path, results))
        lister.start()
        listed = results.get()
        lister.join()
        print(f"{flags.lines:,} lines, {size / 1e9:.2f} GB\n\n| | |\n|---|---|")
        print(f"| index built | {building:.1f} s, {size / 1e6 / building:.0f} MB/s |")
        print(f"| opened | {1e3 * opening:.1f} ms |")
        print(f"| pickle | {len(pickle.dumps(store)):,} bytes |")
        print(f"| memory of each of {flags.processes} processes that read | at most {max(readers) / 1e6:.2f} MB |")
        print(f"| memory of a process with a list of the lines | {listed / 1e6:,.0f} MB |")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
