"""Requests to end: a signal only sets a flag, which whoever works for long polls between two pieces of work."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Raised by :func:`poll` in work that can be given up."""


class _Ambient:
    request: str | None = None
    launcher: int | None = None


_ambient = _Ambient()


@contextmanager
def signals_request_end() -> Iterator[None]:
    """Inside the block the :data:`SIGNALS` set the flag; a second Ctrl-C ends the process at once, as ever.

    The end of torchrun or accelerate launch, which leaves its processes behind when it is killed, sets it, too.
    """
    _ambient.request = None
    _ambient.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = [number for number in SIGNALS if before[number] != signal.SIG_IGN]  # nohup ignores SIGHUP, and means it
    for number in heeded:
        signal.signal(number, _request_end)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
        _ambient.request = _ambient.launcher = None


def requested() -> str | None:
    """What asked for the end, or None."""
    if _ambient.launcher is not None and os.getppid() != _ambient.launcher:
        return _ambient.request or "the end of its launcher"
    return _ambient.request


def poll() -> None:
    """Give up what is being done if an end was requested.

    Raises:
        Interrupted: then.
    """
    request = requested()
    if request is not None:
        raise Interrupted(request)


def leave_signals_to_parent(_worker: int) -> None:
    """Ignore the signals in this process, a helper that ends with its parent."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _request_end(number: int, _frame: FrameType | None) -> None:
    _ambient.request = signal.Signals(number).name
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # not print: a signal may come in the middle of one
            os.write(2, f"\n{_ambient.request}: this step, a checkpoint, the end; Ctrl-C ends at once\n".encode())
