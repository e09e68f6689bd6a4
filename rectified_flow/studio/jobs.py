"""Jobs: commands of the program as processes of their own, which outlive the page and the studio.

A job is a folder below :data:`STUDIO`, and its files are its state, so that a studio that is started again knows it.
Each file has one writer. The studio writes ``job.json`` (the command), ``process`` (the PID of the job), and the empty
file ``stop``. The process of the job (``python -m rectified_flow.studio.jobs FILE``) waits until the job may begin,
writes the empty file ``begun``, runs the command, and writes ``ended`` (the exit code). What it prints is in
``output.txt``. Only one job trains at a time.
"""

import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from shutil import make_archive, rmtree
from subprocess import DEVNULL, Popen
from typing import Literal, get_args

import psutil

from rectified_flow.cli.programs import COMMAND, main
from rectified_flow.errors import BusyError, UsageError
from rectified_flow.registry import Document
from rectified_flow.system.files import locked, read_document, replace_file, writing

STUDIO = Path(".studio")
"""Folder of the studio, in the folder of the runs."""
JOB, PROCESS, BEGUN, ENDED, STOP, OUTPUT = "job.json", "process", "begun", "ended", "stop", "output.txt"
PROCESS_OF_JOB = (sys.executable, "-m", "rectified_flow.studio.jobs")
KEPT = 60  # number of ended jobs whose folders stay
POLL = 0.25  # interval at which a job checks the jobs before it [s]
NICENESS = {"train": 10}
"""Niceness of the processes by kind: the page answers at once while all cores train."""
CLOCK_ERROR = 2.0  # largest difference between the clocks of this machine and of its disk [s]
Form = Literal["page", "onnx", "diffusers"]
"""Kinds of jobs that export a generator."""
Kind = Literal["look", "train", "draw"] | Form


@dataclass(frozen=True)
class Job:
    """A requested command; the contents of ``job.json``."""

    folder: Path
    """Folder of the files of the job, named for the time at which it was asked for [s since 1970]."""
    kind: Kind
    run: str
    """Name of the run that the command is about."""
    words: list[str]
    """The words after the name of the program. The last one is the folder that the command writes."""
    choices: Document = field(default_factory=dict)
    """What the person chose on the page, by which a reloaded page shows it again."""

    @property
    def output_folder(self) -> Path:
        """The folder that the command writes."""
        return Path(self.words[-1])

    @property
    def is_busy(self) -> bool:
        """Whether the job waits or runs."""
        return not (self.folder / ENDED).exists() and is_alive(self.pid, self.folder / PROCESS)

    @property
    def has_begun(self) -> bool:
        """Whether the command was started."""
        return (self.folder / BEGUN).exists()

    @property
    def pid(self) -> int:
        """The PID of the job; -1 if it has none."""
        return int(text_of(self.folder / PROCESS) or -1)

    @property
    def code(self) -> int | None:
        """The exit code of the command; None before its end, or if its process was killed."""
        text = text_of(self.folder / ENDED)
        return int(text) if text else None

    @property
    def output(self) -> str:
        """Everything that the command has printed."""
        return text_of(self.folder / OUTPUT)

    @property
    def zip(self) -> Path:
        """The zip of what the command wrote, named for a person who downloads it."""
        return self.folder / f"{Path(self.run).name}-{self.output_folder.name}.zip"

    @property
    def is_stopping(self) -> bool:
        """Whether the job was asked to stop."""
        return (self.folder / STOP).exists()

    def stop(self) -> None:
        """Ask the job to stop: a training saves a checkpoint first, and a job that waits ends at once."""
        (self.folder / STOP).touch()
        if self.is_busy:
            with suppress(psutil.Error, ValueError):  # it ended just now; os.kill would take -1 for all processes
                psutil.Process(self.pid).terminate()


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
    """Start a command, and return its job; a training waits for earlier trainings."""
    for old in [job for job in jobs(runs) if not job.is_busy][:-KEPT]:
        rmtree(old.folder, ignore_errors=True)
    job = Job(_place(runs) / f"{time.time():.6f}", kind, run, words, choices or {})
    job.folder.mkdir(parents=True)
    # No file of a job is flushed to the disk, so that the page responds immediately.
    replace_file(job.folder / JOB, json.dumps(asdict(job), default=str), durable=False)
    _start_process(job)
    return job


def jobs(runs: Path, kind: Kind | None = None, run: str | None = None) -> list[Job]:
    """Return the jobs that were started, oldest first: all, or those of a kind, or about a run."""
    found = list[Job]()
    for path in sorted(_place(runs).glob(f"*/{PROCESS}")):
        with suppress(UsageError):  # it was removed just now, or cut off when the machine was switched off
            job = read(path.with_name(JOB))
            if kind in (None, job.kind) and run in (None, job.run):
                found.append(job)
    return found


def newest(runs: Path, kind: Kind, run: str | None = None) -> Job | None:
    """Return the newest job of a kind, about a run if one is named."""
    return next(reversed(jobs(runs, kind, run)), None)


def queue(runs: Path) -> list[Job]:
    """Return the jobs that train or wait for it, in their order."""
    return [job for job in jobs(runs, "train") if job.is_busy]


def resume(runs: Path) -> None:
    """Start each job again that was killed before it began, for example when the machine was switched off."""
    for job in jobs(runs, "train"):
        if not (job.is_busy or job.has_begun or job.is_stopping):
            _start_process(job)


def _place(runs: Path) -> Path:
    """Return the folder of the jobs of this machine: a machine that shares the folder of the runs has its own."""
    return runs / STUDIO / "jobs" / platform.node()


def _start_process(job: Job) -> None:
    """Start the process of a job, in a session that the end of the studio and Ctrl-C in its terminal do not reach."""
    with (job.folder / OUTPUT).open("ab") as output:
        command = [*PROCESS_OF_JOB, str(job.folder / JOB)]
        process = Popen(command, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True)
    replace_file(job.folder / PROCESS, str(process.pid), durable=False)


def execute(job: Job) -> None:
    """Wait until a job may begin, run it, and write its exit code. Does nothing if another process does or did so."""
    with suppress(BusyError), locked(job.folder, "job", timeout=0):
        while _waits(job):
            time.sleep(POLL)
        if not (job.has_begun or job.is_stopping):
            with suppress(OSError):  # the disk may be full
                (job.folder / BEGUN).touch()
            replace_file(job.folder / ENDED, str(_code_of(job)), durable=False)


def _waits(job: Job) -> bool:
    """Return whether an older job trains or waits for it."""
    return job.kind == "train" and any(other.folder < job.folder for other in queue(job.folder.parents[3]))


def _code_of(job: Job) -> int:
    """Run the command of a job in this process, zip what an export wrote, and return the exit code."""
    os.nice(NICENESS.get(job.kind, 0))
    sys.argv = [COMMAND, *job.words]
    try:
        main()
    except SystemExit as end:
        if end.code or job.kind not in get_args(Form):
            return int(end.code or 0)
    try:
        with writing(job.zip.name, UsageError, "make room on the disk, and try again"):
            make_archive(str(job.zip.with_suffix("")), "zip", job.output_folder)
    except UsageError as error:
        job.zip.unlink(missing_ok=True)  # makes room for the sentence
        print(f"error: {error}", flush=True)
        return 1
    return 0


@cache
def read(path: Path) -> Job:
    """Return the job of a ``job.json``, in whose folder the job is now: the folder of the runs may have been moved."""
    return replace(read_document(path, Job), folder=path.parent)


if __name__ == "__main__":
    execute(read(Path(sys.argv[1])))
