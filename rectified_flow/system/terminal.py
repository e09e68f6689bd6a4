"""The standard streams of a program, and the lines and progress bars that it prints.

A stream may be missing when the program starts, have any encoding, and be closed before the program ends.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm.auto import tqdm

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_missing_streams() -> None:
    """Open the null device for each standard stream that was closed when the program started.

    Otherwise the next file to be opened would get the stream's descriptor, and the output of libraries with it.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Inside the block, output that cannot be written or encoded raises no error.

    Output to a closed terminal or pipe, or to a full disk, is discarded. Characters that the encoding lacks are
    escaped.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _TolerantFile(FileIO):
    """A file that discards bytes which cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def _tolerant(stream: TextIO) -> TextIO:
    if not isinstance(stream, TextIOWrapper):  # notebooks and tests use streams of other classes
        return stream
    if not isinstance(stream.buffer, BufferedWriter | FileIO):
        stream.reconfigure(errors="backslashreplace")
        return stream
    with suppress(OSError):  # the terminal or pipe may be closed
        stream.flush()
    # Python would flush the stream's own buffer again at exit.
    file = _TolerantFile(stream.fileno(), "w", closefd=False)
    buffer = file if stream.write_through else BufferedWriter(file)
    return TextIOWrapper(
        buffer,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def progress_bar(**arguments: Any) -> "tqdm[Any]":
    """Return a tqdm bar as wide as the terminal; without a terminal, it is refreshed every 30 seconds."""
    from tqdm.auto import tqdm  # programs parse their flags before anything slow is imported

    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(dynamic_ncols=True, mininterval=interval, maxinterval=interval, **arguments)


def escaped(text: str) -> str:
    """Return a text with escapes for characters that control a terminal or turn the direction of writing."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def line(label: str, text: object) -> str:
    """Return a line like ``samples     runs/demo/samples/step_00000900.png``."""
    return escaped(f"{label:<11} {text}")


def lines(texts: Mapping[str, object]) -> str:
    """Return a line for each label."""
    return "\n".join(line(label, text) for label, text in texts.items())


def size_text(width: int, height: int) -> str:
    """Return the sides of a picture: ``64`` for a square, else like ``96x64``."""
    return str(width) if width == height else f"{width}x{height}"


class Silent:
    """Stand-in for an object that only the main process has: every method exists, does nothing and returns None."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_options: None


def duration(seconds: float) -> str:
    """Return a time in a fitting unit, such as ``12 minutes``."""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}
    unit, size = next((each for each in units.items() if seconds >= each[1]), ("ms", 1e-3))
    return f"{seconds / size:.{0 if seconds / size >= 10 else 1}f} {unit}"
