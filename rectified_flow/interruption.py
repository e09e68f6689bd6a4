"""Requests to end: where there is something to save, a signal only sets a flag, polled between two pieces of work."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
ECHO = 1.0
"""Seconds in which a second signal is taken for the same request, come another way: from a launcher, say."""


class Interrupted(KeyboardInterrupt):
    """The end was requested, and what is being done can be given up."""


class _Ambient:
    deferring = False
    request: str | None = None
    requested_at = 0.0
    launcher: int | None = None


_ambient = _Ambient()


@contextmanager
def signals_request_end() -> Iterator[None]:
    """Inside the block the :data:`SIGNALS` raise :class:`Interrupted`, or set a flag within :func:`deferring`.

    A second Ctrl-C ends the process at once, as ever; torchrun and accelerate launch hand it on as SIGTERM. Their own
    end, when they are killed and leave their processes behind, is a request, too.
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


@contextmanager
def deferring() -> Iterator[None]:
    """Inside the block a signal sets a flag and nothing else: whoever works polls it and saves first."""
    _ambient.deferring = True
    try:
        yield
    finally:
        _ambient.deferring = False


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
    now = time.monotonic()
    if _ambient.request is not None:
        impatient = number == signal.SIGINT or (number, _ambient.request) == (signal.SIGTERM, "SIGINT")
        if impatient and now - _ambient.requested_at > ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return
    _ambient.request, _ambient.requested_at = signal.Signals(number).name, now
    if not _ambient.deferring:
        raise Interrupted(_ambient.request)
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # not print: a signal may come in the middle of one
            os.write(2, f"\n{_ambient.request}: this step, a checkpoint, the end; Ctrl-C now ends at once\n".encode())
