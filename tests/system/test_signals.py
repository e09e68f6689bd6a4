"""Tests of signals, which set a flag that interruptible work polls."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rectified_flow.cli import programs as launch
from rectified_flow.system import signals as interruption
from rectified_flow.system.signals import (
    ECHO,
    Interrupted,
    defer_signals,
    raise_if_stop_requested,
    stop_on_signals,
    stop_requested,
)
from tests.patience import PATIENCE, wait_for

FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_signals_set_the_flag_and_are_given_back(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with stop_on_signals(), defer_signals():
        raise_if_stop_requested()
        os.kill(os.getpid(), number)
        assert stop_requested() == name
        with pytest.raises(Interrupted, match=name):
            raise_if_stop_requested()
    assert stop_requested() is None
    assert signal.getsignal(number) == before


def test_the_same_request_by_two_ways_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "ECHO", PATIENCE)
    with stop_on_signals(), defer_signals():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested() == "SIGINT"


def test_where_nothing_is_to_be_saved_a_signal_raises() -> None:
    with stop_on_signals(), pytest.raises(Interrupted, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop_requested() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def wait_forever(ready: Path) -> None:
    with stop_on_signals(), defer_signals():
        ready.touch()
        while stop_requested() is None:
            time.sleep(0.01)
        ready.unlink()
        while True:
            time.sleep(0.01)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, second: signal.Signals) -> None:
    """Launchers hand it on as SIGTERM."""
    ready = tmp_path / "ready"
    process = FORK.Process(target=wait_forever, args=(ready,))
    process.start()
    assert process.pid is not None
    for present in (True, False):
        wait_for("the child's mark", ready.exists if present else lambda: not ready.exists())
        time.sleep(0.0 if present else 1.1 * ECHO)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT if present else second)
    process.join(PATIENCE)
    assert process.exitcode == -second


def test_the_end_of_the_launcher_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with stop_on_signals():
        assert stop_requested() is None
        monkeypatch.setattr(os, "getppid", lambda: -1)
        assert stop_requested() == "launcher exited"


def names_accelerate(process: int) -> bool:
    return b"accelerate" in Path(f"/proc/{process}/cmdline").read_bytes()


def test_the_end_of_accelerate_launch_is_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher of a single process is known by its command line only."""
    for name, request in {"accelerate": "launcher exited", "script": None}.items():
        (tmp_path / name).write_text("import sys; sys.stdin.read()")
        parent = subprocess.Popen([sys.executable, tmp_path / name, "accelerate"], stdin=subprocess.PIPE)
        wait_for("its command line, which is empty for a moment", partial(names_accelerate, parent.pid))
        with monkeypatch.context() as patched, parent:
            patched.setattr(os, "getppid", lambda pid=parent.pid: pid)
            with stop_on_signals():
                patched.setattr(os, "getppid", lambda: 1)
                assert stop_requested() == request
            parent.communicate()


def start_program(folder: Path, flags: list[str]) -> None:
    sys.argv, sys.path = ["program.py", *flags], [str(folder), *sys.path]
    launch.run("interrupted_module:main", "rectified_flow.cli.model_flags:SampleConfig", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_amid_the_imports_of_a_program_ends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """A module that catches everything cannot hold up the end."""
    interrupt = f"import os, signal\ntry:\n os.kill(os.getpid(), {number:d})\nexcept BaseException: 1 / 0\n"
    (tmp_path / "interrupted_module.py").write_text(interrupt)
    for flags in ([], ["--import", "interrupted_module"]):
        process = FORK.Process(target=start_program, args=(tmp_path, flags))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -number
        assert capfd.readouterr().err == ""
