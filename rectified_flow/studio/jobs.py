"""Jobs: commands of the program as processes of their own, which outlive the page and the studio.

A job is a folder below :data:`STUDIO`, and its files are its state, so that a studio that is started again knows it.
Each file is written whole and has one writer. The studio writes ``job.json`` (the command), ``keeper`` (the PID of
the keeper), and the empty file ``stop``. The keeper of the job, a small process (``python -m
rectified_flow.studio.jobs FOLDER``), waits until the job may begin, starts the command, and writes ``process`` (the
PID of the command), ``output.txt``, and ``ended`` (the exit code). Only one job trains at a time.
"""

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from shutil import make_archive, rmtree
from subprocess import DEVNULL, Popen
from typing import Literal

import psutil

from rectified_flow.errors import BusyError, UsageError
from rectified_flow.registry import Document
from rectified_flow.system.files import locked, read_document, replace_file, writing

STUDIO = Path(".studio")
"""Folder of the studio, in the folder of the runs."""
JOB, KEEPER, PROCESS, ENDED, STOP, OUTPUT = "job.json", "keeper", "process", "ended", "stop", "output.txt"
PROGRAM = (sys.executable, "-m", "rectified_flow")
KEPT = 60  # number of ended jobs whose folders stay
POLL = 0.25  # time between two looks of a keeper at its job [s]
NICENESS = {"train": 10}
"""Niceness of the processes by kind: the page answers at once while all cores train."""
CLOCK_ERROR = 2.0  # largest difference between the clocks of this machine and of its disk [s]
Kind = Literal["look", "train", "draw", "take"]
JobState = Literal["waiting", "running", "ended", "lost"]
"""A job is lost if its keeper and command ended without writing ``ended``, for example after a power failure."""


@dataclass(frozen=True)
class Command:
    """The contents of ``job.json``."""

    kind: Kind
    run: str
    """Name of the run that the command is about."""
    words: list[str]
    """The words after the name of the program. The last one is the folder that the command writes."""
    choices: Document = field(default_factory=dict)
    """What the person chose on the page, by which a reloaded page shows it again."""

    @property
    def folder(self) -> Path:
        """The folder that the command writes."""
        return Path(self.words[-1])


@dataclass(frozen=True)
class Job:
    """A command that was asked for. Its folder is named for the time at which it was asked for [s since 1970]."""

    folder: Path

    @property
    def command(self) -> Command:
        """The command."""
        return _command(self.folder / JOB)

    @property
    def state(self) -> JobState:
        """The state of the job."""
        lives = self._lives(KEEPER) or self._lives(PROCESS)  # read first, as the keeper ends after it wrote the end
        if (self.folder / ENDED).exists():
            return "ended"
        if not lives:
            return "lost"
        return "running" if self.has_begun else "waiting"

    @property
    def is_busy(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in ("waiting", "running")

    @property
    def has_begun(self) -> bool:
        """Whether the command was started."""
        return (self.folder / PROCESS).exists()

    @property
    def code(self) -> int | None:
        """The exit code of the command; None before its end, or if it was stopped before it began."""
        text = text_of(self.folder / ENDED)
        return int(text) if text else None

    @property
    def output(self) -> str:
        """Everything that the command has printed."""
        return text_of(self.folder / OUTPUT)

    @property
    def zip(self) -> Path:
        """The zip of what the command wrote, named for a person who downloads it."""
        return self.folder / f"{Path(self.command.run).name}-{self.command.folder.name}.zip"

    @property
    def is_stopping(self) -> bool:
        """Whether the job was asked to stop."""
        return (self.folder / STOP).exists()

    def stop(self) -> None:
        """Ask the job to stop: a training saves a checkpoint first. A command without its keeper is asked directly."""
        (self.folder / STOP).touch()
        if self._lives(PROCESS) and not self._lives(KEEPER):
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(int(text_of(self.folder / PROCESS)), signal.SIGTERM)

    def _lives(self, name: str) -> bool:
        """Return whether the process of a PID file is alive."""
        return is_alive(int(text_of(self.folder / name) or -1), self.folder / name)


def text_of(path: Path) -> str:
    """Return the text in a file, which is empty if it is missing."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def is_alive(pid: int, file: Path) -> bool:
    """Return whether the process of a PID file is alive. A process younger than the file has reused the PID."""
    with suppress(psutil.Error, OSError, ValueError):
        process = psutil.Process(pid)
        is_older = process.create_time() < file.stat().st_mtime + CLOCK_ERROR
        return is_older and process.status() != psutil.STATUS_ZOMBIE
    return False


def start(runs: Path, kind: Kind, run: str, words: list[str], choices: Document | None = None) -> Job:
    """Start a :class:`Command`, and return its job; a training waits for earlier trainings."""
    for old in [job for job in jobs(runs) if job.state == "ended"][:-KEPT]:
        rmtree(old.folder, ignore_errors=True)
    job = Job(_place(runs) / f"{time.time():.6f}")
    job.folder.mkdir(parents=True)
    # No file of a job is flushed to the disk, so that the page responds immediately.
    replace_file(job.folder / JOB, json.dumps(asdict(Command(kind, run, words, choices or {}))), durable=False)
    _keep(job)
    return job


def jobs(runs: Path, kind: Kind | None = None, run: str | None = None) -> list[Job]:
    """Return the jobs in the folder of the runs, oldest first: all, or those of a kind, or about a run."""
    found = list[Job]()
    for path in sorted(_place(runs).glob(f"*/{JOB}")):
        with suppress(UsageError):  # it was removed just now, or cut off when the machine was switched off
            command = _command(path)
            if kind in (None, command.kind) and run in (None, command.run):
                found.append(Job(path.parent))
    return found


def newest(runs: Path, kind: Kind, run: str | None = None) -> Job | None:
    """Return the newest job of a kind, about a run if one is named."""
    return next(reversed(jobs(runs, kind, run)), None)


def queue(runs: Path) -> list[Job]:
    """Return the jobs that train or wait for it, in their order."""
    return [job for job in jobs(runs, "train") if job.is_busy]


def resume(runs: Path) -> None:
    """Give a keeper to each job that lost its keeper before it began, for example when the machine was switched off."""
    for job in jobs(runs, "train"):
        if job.state == "lost" and not job.has_begun:
            _keep(job)


def _place(runs: Path) -> Path:
    """Return the folder of the jobs of this machine: a machine that shares the folder of the runs has its own."""
    return runs / STUDIO / "jobs" / platform.node()


def _keep(job: Job) -> None:
    """Start the keeper of a job, in a session that neither the end of the studio nor Ctrl-C in its terminal reaches."""
    command = [sys.executable, "-m", "rectified_flow.studio.jobs", str(job.folder)]
    with (job.folder / OUTPUT).open("ab") as output:
        keeper = Popen(command, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True)
    replace_file(job.folder / KEEPER, str(keeper.pid), durable=False)


def keep(job: Job) -> None:
    """Wait until a job may begin, run its command, and write how it ended. Does nothing if another keeper does so."""
    with suppress(BusyError), locked(job.folder, "keeper", timeout=0):
        while not job.is_stopping and _waits(job):
            time.sleep(POLL)
        code = None if job.is_stopping or job.has_begun else _run(job)
        if code == 0 and job.command.kind == "take":
            code = _pack(job)
        replace_file(job.folder / ENDED, "" if code is None else str(code), durable=False)


def _waits(job: Job) -> bool:
    """Return whether an older job trains or waits for it."""
    return job.command.kind == "train" and any(other.folder < job.folder for other in queue(job.folder.parents[3]))


def _run(job: Job) -> int:
    """Run the command of a job, and return its exit code. A request to stop becomes SIGTERM, once."""
    os.nice(NICENESS.get(job.command.kind, 0))  # the command inherits it
    with (job.folder / OUTPUT).open("ab") as output:
        process = Popen([*PROGRAM, *job.command.words], stdin=DEVNULL, stdout=output, stderr=output)
    with suppress(OSError):  # the disk may be full
        replace_file(job.folder / PROCESS, str(process.pid), durable=False)
    while process.poll() is None and not job.is_stopping:
        time.sleep(POLL)
    process.terminate()  # nothing is sent to a process that has ended
    return process.wait()


def _pack(job: Job) -> int:
    """Zip what the command of a job wrote, and return the exit code of the job."""
    try:
        with writing(job.zip.name, UsageError, "make room on the disk, and try again"):
            make_archive(str(job.zip.with_suffix("")), "zip", job.command.folder)
    except UsageError as error:
        job.zip.unlink(missing_ok=True)  # makes room for the sentence
        with (job.folder / OUTPUT).open("a") as output:
            output.write(f"error: {error}\n")
        return 1
    return 0


_command: Callable[[Path], Command] = cache(partial(read_document, schema=Command))
"""Returns the contents of a ``job.json``."""


if __name__ == "__main__":
    keep(Job(Path(sys.argv[1])))
