"""Processes that wait for each other say for whom, while a launch starts.

Each process writes into the store of the process group when it comes to a meeting and when it is through. Where a
meeting takes long, one of those that wait reads there who is missing.
"""

import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

from torch.distributed import Store  # type: ignore[attr-defined]

POLL = 0.1
"""Seconds between two looks."""
INTERVAL = 30.0
"""Seconds that a process waits before the first line, and between two lines."""
SHOWN = 8


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition`` comes true within that time; a signal ends this wait, but none of those inside torch."""
    patience = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < patience:
        time.sleep(POLL)
    return met


@contextmanager
def reported(awaited: Callable[[], str | None]) -> Iterator[None]:
    """While the block lasts, print every :data:`INTERVAL` seconds what ``awaited`` returns: what this process awaits.

    A thread calls ``awaited``, since the block may be inside a library. Where it returns None or fails, nothing is
    printed.
    """
    done = Event()

    def report() -> None:
        while not done.wait(INTERVAL):
            with suppress(Exception):  # a store that is gone; the block will fail by itself
                text = awaited()
                if text is not None and not done.is_set():
                    print(f"waiting for {text}", file=sys.stderr, flush=True)

    Thread(target=report, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Meeting:
    """A point in the program that all processes come to.

    Args:
        store: where each process writes that it has come.
        name: of the meeting; each of a program's meetings needs a name of its own.
        rank: of this process.
        world_size: how many processes are to come.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self.store, self.rank = store, rank
        self._keys = [f"meeting/{name}/{each}" for each in range(world_size)]

    def is_complete(self) -> bool:
        """Whether all have come."""
        return self.store.check(self._keys)

    @contextmanager
    def attended(self, *, absent: str, slow: Callable[[], str]) -> Iterator[None]:
        """A block that is over when all processes are in it; while it lasts, say who is missing.

        Args:
            absent: said of ranks that have not come.
            slow: returns what is said of ranks that have come and are not through, once all have come.
        """
        mine = self._keys[self.rank]
        self.store.set(mine, platform.node())
        with reported(lambda: self._awaited(absent, slow)):
            yield
        self.store.set(f"{mine}/through", "")

    def _awaited(self, absent: str, slow: Callable[[], str]) -> str | None:
        """What to say of whom, on the lowest rank that waits; a connection of its own, as the block may hold ours."""
        store = self.store.clone()
        come = [rank for rank, key in enumerate(self._keys) if store.check([key])]
        waiting = [rank for rank in come if not store.check([f"{self._keys[rank]}/through"])]
        if self.rank != min(waiting):
            return None
        missing = [rank for rank in range(len(self._keys)) if rank not in come]
        if missing:
            return f"{in_words(missing)} (of {len(self._keys)} processes) {absent}"
        return f"{in_words(waiting)} (of {len(self._keys)} processes) {slow()}"


def in_words(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2, 3``, of many the first ones and their number."""
    shown = ", ".join(map(str, ranks[:SHOWN])) + f", ... ({len(ranks)} in all)" * (len(ranks) > SHOWN)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
