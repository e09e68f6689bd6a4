"""Progress bars in a common style, and output streams that may close before the run ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from tqdm.auto import tqdm


def progress_bar(**arguments: Any) -> "tqdm[Any]":
    """A tqdm bar that fits the terminal. Without a terminal, it is refreshed every 30 seconds."""
    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(dynamic_ncols=True, mininterval=interval, maxinterval=interval, **arguments)


@contextmanager
def tolerate_closed_streams() -> Iterator[None]:
    """Inside the block, output to a closed terminal or pipe is discarded without an error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_SafeStream(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _SafeStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._or_silent():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._or_silent():
            self._stream.flush()

    @contextmanager
    def _or_silent(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            # The remaining buffer is flushed at exit and needs a valid file descriptor.
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
