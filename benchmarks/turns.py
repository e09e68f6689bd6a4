"""Time several contenders in turns, each in its own process, so that a disturbance of the machine affects all of them.

On a CPU, the clock is the processor time of one thread, on which other programs have little effect. On a GPU, it is
wall time. Compare the ratios, not the times: the speed of the machine cancels in a ratio.
"""

import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

PEER = "rectified-flow-pytorch"
Contender = Callable[["Turns"], object]
"""A function to be timed. It works until :class:`Turns` stops it, and must be picklable."""


class _Over(BaseException):
    pass


class Turns:
    """The contender's side: it reports each finished piece of work, and waits there for its next turn.

    Args:
        connection: connection to the process that assigns the turns.
        pieces: pieces of work per turn.
        warm_up: pieces of work before the first turn.
    """

    def __init__(self, connection: Connection, pieces: int, warm_up: int) -> None:
        self._connection, self._pieces, self._left = connection, pieces, warm_up
        self._work, self._began = 0.0, read_clock()
        self.facts: dict[str, Any] = {}
        """Further facts about the contender, returned with its times."""

    def done(self, work: float = 1) -> None:
        """Report a finished piece of ``work`` units, such as images. Times are compared per unit."""
        self._left -= 1
        self._work += work
        if self._left > 0:
            return
        self._connection.send((read_clock() - self._began) / self._work)
        if not self._connection.recv():
            raise _Over
        self._left, self._work = self._pieces, 0.0
        self._began = read_clock()


@dataclass(frozen=True)
class Times:
    """The measured times of one contender."""

    seconds: list[float]
    """Seconds per unit of work, for each round."""
    facts: Mapping[str, Any]

    @property
    def median(self) -> float:
        """Median seconds per unit."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """The median and the range of a ratio over rounds."""

    median: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{_digits(self.median)} [{_digits(self.lowest)}, {_digits(self.highest)}]"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def ratio(of: Times, to: Times) -> Ratio:
    """Return the time of ``of`` divided by the time of ``to``, round by round."""
    ratios = [a / b for a, b in zip(of.seconds, to.seconds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def take_turns(
    contenders: Mapping[str, Contender],
    *,
    rounds: int = 5,
    pieces: int = 1,
    warm_up: int = 1,
    minutes: float = math.inf,
) -> dict[str, Times]:
    """Time each contender in turn. The order is reversed from round to round.

    Args:
        contenders: the contenders by name.
        rounds: turns per contender.
        pieces: pieces of work per turn.
        warm_up: pieces of work before the first turn, which are not timed.
        minutes: no further round begins once this time is over, the warm-up included.
    """
    spawn, began = multiprocessing.get_context("spawn"), time.monotonic()
    connections: dict[str, Connection] = {}
    processes = []
    for name, contender in contenders.items():
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_work, args=(contender, theirs, pieces, warm_up), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections[name] = ours
        _hear(ours, name)  # its warm-up
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds):
        if is_over(began, minutes) and round_ > 0:
            break
        for name in list(contenders) if round_ % 2 == 0 else reversed(list(contenders)):
            connections[name].send(True)
            seconds[name].append(_hear(connections[name], name))
    facts = {}
    for name, connection in connections.items():
        connection.send(False)
        facts[name] = _hear(connection, name)
    for process in processes:
        process.join()
    return {name: Times(seconds[name], facts[name]) for name in contenders}


def is_over(began: float, minutes: float) -> bool:
    """Return whether some minutes have passed since ``began``, a time of ``time.monotonic``."""
    return time.monotonic() - began > 60 * minutes


def _hear(connection: Connection, name: str) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"{name} ended too early; see above") from None


def _work(contender: Contender, connection: Connection, pieces: int, warm_up: int) -> None:
    torch.set_num_threads(1)
    turns = Turns(connection, pieces, warm_up)
    try:
        contender(turns)
    except _Over:
        connection.send(turns.facts)


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has finished all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_clock() -> float:
    """Return the processor time of this process, or with a GPU the wall time after all its work is finished [s]."""
    wait_for_device()
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def describe_machine() -> str:
    """Return the name of the GPU, or else of the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"


@dataclass(frozen=True)
class Row:
    """A row of the table: the subject, its baseline, the aim, the result and a remark."""

    what: str
    against: str
    aim: str
    measured: str
    remark: str = ""


def print_rows(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    lines = ["| what | against | aim | measured | |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.against} | {row.aim} | **{row.measured}** | {row.remark} |" for row in rows]
    return "\n".join(lines)


def synchronized(action: Callable[[], object]) -> float:
    """Seconds until ``action`` and all the device work that it launches are finished."""
    wait_for_device()
    began = time.perf_counter()
    action()
    wait_for_device()
    return time.perf_counter() - began
