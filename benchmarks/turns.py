"""Time things beside each other: each in a process of its own, in turns, so that what disturbs one disturbs all.

On a CPU the clock counts the processor time of one thread, which other programs on the machine change little; on a GPU
it is the wall's. Of what comes out, look at the ratios: how fast the machine was meanwhile is in both their parts.
"""

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

Contender = Callable[["Turns"], object]
"""What is timed: works until :class:`Turns` ends it, and must be picklable."""


class _Over(BaseException):
    pass


class Turns:
    """A contender's side: it says when a piece of work is done, and waits there for its next turn.

    Args:
        connection: to who gives the turns.
        pieces: of work in a turn.
        warm_up: pieces of work before the first.
    """

    def __init__(self, connection: Connection, pieces: int, warm_up: int) -> None:
        self._connection, self._pieces, self._left = connection, pieces, warm_up
        self._work, self._began = 0.0, read_clock()
        self.facts: dict[str, Any] = {}
        """What else there is to know about the contender; kept with its times."""

    def done(self, work: float = 1) -> None:
        """A piece of work is done, of so many units; those are what is compared, a thousand images, say."""
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
    """What was measured of one contender."""

    seconds: list[float]
    """For a unit of work, a number for each round."""
    facts: Mapping[str, Any]

    @property
    def median(self) -> float:
        """Seconds of a unit."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times as much, by the median of the rounds, and the range of them."""

    median: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{_digits(self.median)} [{_digits(self.lowest)}, {_digits(self.highest)}]"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def ratio(of: Times, to: Times) -> Ratio:
    """Time of the one over time of the other, round by round."""
    ratios = [a / b for a, b in zip(of.seconds, to.seconds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def take_turns(
    contenders: Mapping[str, Contender], *, rounds: int = 5, pieces: int = 1, warm_up: int = 1
) -> dict[str, Times]:
    """Let each contender do ``pieces`` of work, one after the other, the order turned round from round to round.

    Args:
        contenders: by name.
        rounds: turns of each.
        pieces: of work in a turn.
        warm_up: pieces of work before the first turn, which are not counted.

    Raises:
        RuntimeError: if one of them ends too early.
    """
    spawn = multiprocessing.get_context("spawn")
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


def _hear(connection: Connection, name: str) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"{name} ended before its time; see above") from None


def _work(contender: Contender, connection: Connection, pieces: int, warm_up: int) -> None:
    torch.set_num_threads(1)
    turns = Turns(connection, pieces, warm_up)
    try:
        contender(turns)
    except _Over:
        connection.send(turns.facts)


def wait_for_device() -> None:
    """Until a GPU, if there is one, has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_clock() -> float:
    """Seconds: of this process's processor time, or where there is a GPU, when all it was given is done."""
    wait_for_device()
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def describe_machine() -> str:
    """The card, or the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, beside what, and what was hoped for."""

    what: str
    against: str
    aim: str
    measured: str
    remark: str = ""


def print_rows(rows: Sequence[Row]) -> str:
    """The table, in Markdown."""
    lines = ["| what | against | aim | measured | |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.against} | {row.aim} | **{row.measured}** | {row.remark} |" for row in rows]
    return "\n".join(lines)
