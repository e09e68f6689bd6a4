"""Stop requests: a signal raises an exception, or sets a flag while there is something to save."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ECHO = 1.0
"""Seconds within which a second signal counts as a duplicate of the first, for example one forwarded by a launcher."""
LAUNCHERS = {b"accelerate", b"accelerate-launch", b"accelerate.commands.launch"}


class Interrupted(KeyboardInterrupt):
    """A stop was requested, and the current work can be abandoned."""


class _Requests:
    deferring = False
    request: str | None = None
    requested_at = 0.0
    launcher: int | None = None


_requests = _Requests()


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside the block, the :data:`SIGNALS` raise :class:`Interrupted`, or set a flag within :func:`defer_signals`.

    A second Ctrl-C kills the process immediately; torchrun and accelerate launch forward it as SIGTERM. The death of
    the launcher counts as a stop request, too.
    """
    _requests.request = None
    _requests.launcher = _find_launcher()
    try:
        with handling_signals(_request_end):
            yield
    finally:
        _requests.request = _requests.launcher = None


def _find_launcher() -> int | None:
    """Return the ID of the parent process if it is a launcher, which ends together with its workers."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    with suppress(OSError, IndexError):  # a single process of accelerate launch, on Linux
        program, *words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        script = words[1] if words[:1] == [b"-m"] else words[0]
        if not LAUNCHERS.isdisjoint(map(os.path.basename, (program, script))):
            return parent
    return None


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Inside the block, the :data:`SIGNALS` call ``handler``, which may be ``signal.SIG_DFL`` to end the process."""
    with ExitStack() as restored:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP; keep that
                restored.callback(signal.signal, number, signal.signal(number, handler))
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Inside the block, a signal only sets a flag; the code inside polls the flag and saves before it stops."""
    _requests.deferring = True
    try:
        yield
    finally:
        _requests.deferring = False


def stop_requested() -> str | None:
    """Return the source of the stop request, such as a signal's name, or None if there is no request."""
    orphaned = _requests.launcher is not None and os.getppid() != _requests.launcher
    return _requests.request or ("launcher exited" if orphaned else None)


def raise_if_stop_requested() -> None:
    """Abandon the current work if a stop was requested."""
    if request := stop_requested():
        raise Interrupted(request)


def leave_signals_to_parent(_worker: int) -> None:
    """Ignore the signals in this process, a helper that exits with its parent."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _request_end(number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    if _requests.request is not None:
        impatient = number == signal.SIGINT or (number, _requests.request) == (signal.SIGTERM, "SIGINT")
        if impatient and now - _requests.requested_at > ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return
    _requests.request, _requests.requested_at = signal.Signals(number).name, now
    if not _requests.deferring:
        raise Interrupted(_requests.request)
    if os.environ.get("RANK", "0") == "0":
        what = "stopping and saving a checkpoint. Press Ctrl-C again to quit immediately."
        with suppress(OSError):  # not by print, which the signal may have interrupted
            os.write(2, f"\n{_requests.request} received: {what}\n".encode())
