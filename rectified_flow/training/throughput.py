"""Images per second."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Images per second of training proper; pauses do not count."""

    def __init__(self) -> None:
        self._images_seen = 0
        self._started = time.perf_counter()

    def restart(self, images_seen: int) -> float:
        """The rate since the last restart, at ``images_seen`` images; then start counting again."""
        now = time.perf_counter()
        rate = (images_seen - self._images_seen) / max(1e-9, now - self._started)
        self._images_seen, self._started = images_seen, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        entered = time.perf_counter()
        yield
        self._started += time.perf_counter() - entered
