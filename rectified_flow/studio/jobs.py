"""Jobs: commands of the program as processes of their own, which outlive the page and the studio.

A job is a folder below :data:`STUDIO`, and its files are its state, so that a studio that is started again knows it.
Each file is written whole and has one writer. The studio writes ``job.json``, the command, and the empty file ``stop``.
The keeper of the job, a small process (``python -m rectified_flow.studio.jobs FOLDER``), waits until the job may begin,
starts the command, and writes ``process.json``, ``output.txt`` and ``ended.json``. Only one job trains at a time.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from secrets import token_hex
from shutil import make_archive, rmtree
from typing import Literal

import psutil

from rectified_flow.errors import BusyError, UsageError
from rectified_flow.system.files import locked, read_document, replace_file

STUDIO = Path(".studio")
"""Folder of the studio, in the folder of the runs."""
JOB, KEEPER, PROCESS, ENDED, STOP, OUTPUT = (
    *("job.json", "keeper.json", "process.json", "ended.json"),
    *("stop", "output.txt"),
)
PROGRAM = (sys.executable, "-m", "rectified_flow")
KEPT = 60  # number of ended jobs whose folders stay
POLL = 0.25  # time between two looks of a keeper at its job [s]
NICENESS = {"train": 10}
"""Niceness of the processes by kind: the page answers at once while all cores train."""
CLOCK_ERROR = 2.0  # largest difference of two readings of the time when a process was created [s]
Kind = Literal["look", "train", "draw", "take"]
JobState = Literal["waiting", "running", "ended", "lost"]
"""A job is lost if its keeper and its command ended without ``ended.json``, as when the machine was switched off."""


@dataclass(frozen=True)
class Command:
    """The contents of ``job.json``."""

    kind: Kind
    run: str
    """Name of the run that the command is about."""
    words: list[str]
    """The words of the command line after the name of the program."""
    choices: dict[str, object] = field(default_factory=dict)
    """What the person chose on the page, by which a reloaded page shows it again."""
    packed: str = ""
    """Folder that the command writes, to be packed into a zip."""


@dataclass(frozen=True)
class Process:
    """A process, identified by its number and its time of creation, as numbers are reused."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the process with a number."""
        return cls(pid, psutil.Process(pid).create_time())

    @property
    def is_alive(self) -> bool:
        """Whether the process runs on this machine."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.created) < CLOCK_ERROR
            return same and found.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@dataclass(frozen=True)
class Job:
    """A command that was asked for. Jobs are ordered by the time at which they were made, which their folders name."""

    folder: Path

    @property
    def command(self) -> Command:
        """The command."""
        return _command(self.folder / JOB)

    @property
    def made(self) -> float:
        """When the job was made [s since 1970]."""
        return float(self.folder.name.partition("-")[0])

    @property
    def state(self) -> JobState:
        """The state of the job."""
        if (self.folder / ENDED).exists():
            return "ended"
        begun, keeper = (_process(self.folder / name) for name in (PROCESS, KEEPER))
        if begun is not None and begun.is_alive:
            return "running"
        if keeper is None or not keeper.is_alive:
            return "ended" if (self.folder / ENDED).exists() else "lost"
        return "waiting" if begun is None else "running"

    @property
    def has_begun(self) -> bool:
        """Whether the command was started."""
        return (self.folder / PROCESS).exists()

    @property
    def code(self) -> int | None:
        """The exit code of the command; None before its end, or if it was stopped before it began."""
        with suppress(UsageError):
            return read_document(self.folder / ENDED, dict[str, int | None])["code"]
        return None

    @property
    def output(self) -> str:
        """Everything that the command has printed."""
        with suppress(OSError):
            return (self.folder / OUTPUT).read_text(errors="replace")
        return ""

    @property
    def zip(self) -> Path:
        """The zip of what the command wrote, named for a person who downloads it."""
        return self.folder / f"{Path(self.command.run).name}-{Path(self.command.packed).name}.zip"

    @property
    def is_stopping(self) -> bool:
        """Whether the job was asked to stop."""
        return (self.folder / STOP).exists()

    def stop(self) -> None:
        """Ask the job to stop: a training saves a checkpoint first."""
        (self.folder / STOP).touch()


def start(runs: Path, command: Command) -> Job:
    """Start a command, and return its job; a training waits for those that were asked for before."""
    known = jobs(runs)
    for old in [job for job in known if job.state == "ended"][:-KEPT]:
        rmtree(old.folder, ignore_errors=True)
    folder = _place(runs) / f"{time.time():.6f}-{token_hex(2)}"
    folder.mkdir(parents=True)
    _write(folder / JOB, asdict(command))
    job = Job(folder)
    _keep(job)
    return job


def jobs(runs: Path, kind: Kind | None = None) -> list[Job]:
    """Return the jobs in the folder of the runs, oldest first; one whose file a full disk cut off is left out."""
    found = list[Job]()
    for path in sorted(_place(runs).glob(f"*/{JOB}"), key=lambda path: float(path.parent.name.split("-")[0])):
        with suppress(UsageError):
            job = Job(path.parent)
            found += [job] * (kind in (None, job.command.kind))
    return found


def newest(runs: Path, kind: Kind, run: str | None = None) -> Job | None:
    """Return the newest job of a kind, about a run if one is named."""
    found = [job for job in jobs(runs, kind) if run in (None, job.command.run)]
    return found[-1] if found else None


def queue(runs: Path) -> list[Job]:
    """Return the jobs that train or wait for it, in their order."""
    return [job for job in jobs(runs, "train") if job.state in ("waiting", "running")]


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
    keeper = subprocess.Popen(
        [sys.executable, "-m", "rectified_flow.studio.jobs", str(job.folder.absolute())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(job.folder / OUTPUT).open("ab"),
        start_new_session=True,
    )
    _write(job.folder / KEEPER, asdict(Process.of(keeper.pid)))


def keep(job: Job) -> None:
    """Wait until a job may begin, run its command, and write how it ended. Does nothing if another keeper does so."""
    with suppress(BusyError), locked(job.folder, "keeper", "another process keeps this job", timeout=0):
        while not job.is_stopping and _waits(job):
            time.sleep(POLL)
        code = None if job.is_stopping or job.has_begun else _run(job)
        if code == 0 and job.command.packed:
            make_archive(str(job.zip.with_suffix("")), "zip", job.command.packed)
        _write(job.folder / ENDED, {"code": code})


def _waits(job: Job) -> bool:
    """Return whether an older job trains or waits for it."""
    runs = job.folder.parents[3]
    return job.command.kind == "train" and any(other.folder.name < job.folder.name for other in queue(runs))


def _run(job: Job) -> int:
    """Run the command of a job, and return its exit code. A request to stop becomes SIGTERM, once."""
    with (job.folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [*PROGRAM, *job.command.words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    with suppress(psutil.Error, OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS.get(job.command.kind, 0))
    with suppress(psutil.Error, OSError):  # it may have ended already, or the disk may be full
        _write(job.folder / PROCESS, asdict(Process.of(process.pid)))
    asked = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(POLL)
        if job.is_stopping and not asked:
            process.terminate()
            asked = True


def _write(path: Path, document: Mapping[str, object]) -> None:
    """Write a file of a job, without waiting for the disk: the page answers at once."""
    replace_file(path, json.dumps(document), durable=False)


def _process(path: Path) -> Process | None:
    with suppress(UsageError):
        return read_document(path, Process)
    return None


@cache
def _command(path: Path) -> Command:
    return read_document(path, Command)


if __name__ == "__main__":
    keep(Job(Path(sys.argv[1])))
