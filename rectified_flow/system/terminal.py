"""Lines and progress bars that a program prints."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from tqdm.auto import tqdm

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ARGUMENT = re.compile(r"(?<![^\s(])`([a-z]\w*)`(?=[.,:;)]*(?:\s|$))")
"""The name of an argument in a message: a word of its own, since the names of files may contain backticks, too."""
_SPELLINGS: list[Callable[[str], str]] = ["`{}`".format]
"""Functions that spell the name of an argument; the last one is in use."""


class _LastingFile(FileIO):
    """A file that discards what cannot be written: to a closed terminal or pipe, or to a full disk."""

    def write(self, data: "ReadableBuffer") -> int:
        """Write bytes, or discard them."""
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Let a program outlive the reader of its output, and print escapes for characters that the encoding lacks.

    Each line is written at once, so that a file has it even if the program is killed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by the caller: the next opened file would get this descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = _prepared(sys.stdout, 1), _prepared(sys.stderr, 2)


def _prepared(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # its descriptor was closed
        stream = TextIOWrapper(FileIO(number, "w", closefd=False))
    if not isinstance(stream, TextIOWrapper):  # notebooks and tests use streams of other classes
        return stream
    try:
        descriptor = stream.fileno()
    except OSError:  # it is in memory
        stream.reconfigure(errors="backslashreplace")
        return stream
    with suppress(OSError):  # the pipe may be closed already
        stream.flush()
    buffer = BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
    return TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True)


def progress_bar(**arguments: object) -> "tqdm[int]":
    """Return a tqdm bar as wide as the terminal; without a terminal, it is refreshed every 30 seconds."""
    from tqdm.auto import tqdm  # programs parse their flags before anything slow is imported

    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(dynamic_ncols=True, mininterval=interval, maxinterval=interval, **arguments)


@contextmanager
def at_least_wide(columns: int) -> Iterator[None]:
    """Give libraries a terminal of at least ``columns`` columns: with few columns, tyro's help does not terminate."""
    given = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns >= columns:
        yield
        return
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS") if given is None else os.environ.update(COLUMNS=given)


@contextmanager
def spelling_arguments(spelling: Callable[[str], str]) -> Iterator[None]:
    """Let :func:`shown` replace the names of arguments inside the block, as a program does by its flags."""
    _SPELLINGS.append(spelling)
    try:
        yield
    finally:
        _SPELLINGS.pop()


def shown(text: str) -> str:
    """Return a text as a terminal shows it.

    The names of arguments, which messages have in backticks, are spelled as the running program does. Characters that
    control a terminal or turn the direction of writing are replaced by escapes.
    """
    text = ARGUMENT.sub(lambda found: _SPELLINGS[-1](found[1]), text)
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@cache
def warn_once(text: str) -> None:
    """Print a warning unless it was printed before."""
    from tqdm.auto import tqdm

    tqdm.write(shown(f"warning: {text}"))


def line(label: str, text: object) -> str:
    """Return a line like ``samples     runs/demo/samples/step_00000900.png``."""
    return shown(f"{label:<11} {text}")


def lines(texts: Mapping[str, object]) -> str:
    """Return a line for each label."""
    return "\n".join(line(label, text) for label, text in texts.items())


def paragraph(label: str, texts: Sequence[str]) -> str:
    """Return a line for each text, the first of which has the label."""
    return "\n".join(line("" if number else label, text) for number, text in enumerate(texts))


def size_text(width: int, height: int) -> str:
    """Return the sides of a picture: ``64`` for a square, else like ``96x64``."""
    return str(width) if width == height else f"{width}x{height}"


class Silent:
    """Stand-in for an object that only the main process has: every method exists, does nothing and returns None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


def duration(seconds: float) -> str:
    """Return a time in a fitting unit, such as ``12 minutes``."""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}
    unit, size = next((each for each in units.items() if seconds >= each[1]), ("ms", 1e-3))
    return f"{seconds / size:.{0 if seconds / size >= 10 else 1}f} {unit}"
