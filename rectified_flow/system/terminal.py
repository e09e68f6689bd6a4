"""The standard streams of a program, and the lines and progress bars that it prints.

A stream may be missing when the program starts, have any encoding, and be closed before the program ends.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm.auto import tqdm

STREAMS = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}
"""Name and mode in :mod:`sys` by file descriptor."""


def open_missing_streams() -> None:
    """Open the null device for each standard stream that was closed when the program started.

    Otherwise the next file to be opened would get the stream's descriptor, and the output of libraries with it.
    """
    for descriptor, (name, mode) in STREAMS.items():
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Inside the block, output that cannot be written or encoded raises no error.

    Output to a closed terminal or pipe is discarded. A character that the encoding lacks is written as its escape.
    """
    before = sys.stdout, sys.stderr
    safe = [_SafeStream(stream) for stream in before]
    sys.stdout, sys.stderr = safe
    try:
        yield
    finally:
        for each in safe:  # Python flushes its streams once more at exit, which must not fail
            with each.discarding_after():
                each.stream.flush()
        sys.stdout, sys.stderr = before


class _SafeStream:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        if isinstance(stream, TextIOWrapper):  # notebooks and tests have streams of another class
            with self.discarding_after():
                stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self.discarding_after(except_for=(ENOSPC, EDQUOT)):  # a full disk may have room later
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.discarding_after(except_for=(ENOSPC, EDQUOT)):
            self.stream.flush()

    @contextmanager
    def discarding_after(self, except_for: tuple[int, ...] = ()) -> Iterator[None]:
        """After an error of the system inside the block, direct the stream to the null device."""
        try:
            yield
        except OSError as error:
            if error.errno not in except_for:
                # The buffer is flushed at exit and needs a valid file descriptor.
                with suppress(OSError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self.stream.fileno())


def progress_bar(**arguments: Any) -> "tqdm[Any]":
    """Return a tqdm bar as wide as the terminal; without a terminal, it is refreshed every 30 seconds."""
    from tqdm.auto import tqdm  # programs parse their flags before anything slow is imported

    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(dynamic_ncols=True, mininterval=interval, maxinterval=interval, **arguments)


WIDTH = 11
"""Characters of a label, at least."""


def line(label: str, text: object) -> str:
    """Return a line like ``samples     runs/demo/samples/step_00000900.png``."""
    return f"{label:<{WIDTH}} {text}"


def lines(texts: Mapping[str, object]) -> str:
    """Return a line for each label."""
    return "\n".join(line(label, text) for label, text in texts.items())


def size_text(width: int, height: int) -> str:
    """Return the sides of a picture: ``64`` for a square, else like ``96x64``."""
    return str(width) if width == height else f"{width}x{height}"


class Silent:
    """Stand-in for an object that only the main process has: every method exists, does nothing and returns None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_options: None
