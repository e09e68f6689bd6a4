"""Tests of jobs: commands as processes that outlive the studio, of which one trains at a time."""

import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rectified_flow.studio import jobs
from rectified_flow.studio.jobs import Job
from rectified_flow.studio.views import message
from tests.patience import wait_for

PROCESS = """
import sys
from errno import ENOSPC
from pathlib import Path
from rectified_flow.studio import jobs

def main():
    exec(sys.argv[1])
    sys.exit()

def fill(name, *_):
    Path(f"{name}.zip").write_text("x")
    raise OSError(ENOSPC, "No space left on device")

jobs.main, jobs.POLL = main, 0.02
jobs.execute(jobs.read(Path(sys.argv[1])))
"""
"""The process of a job that runs Python code in place of a command of the program."""
SAVING = """
import signal, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("began", flush=True)
time.sleep(600)
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Ask for Python code in place of a command of the program."""
    monkeypatch.setattr(jobs, "PROCESS_OF_JOB", (sys.executable, "-c", PROCESS))
    yield lambda code, kind="train", *words: jobs.start(tmp_path, kind, "cats", [code, *words])
    for job in jobs.jobs(tmp_path):
        if job.is_busy:
            os.kill(job.pid, signal.SIGKILL)


def end(job: Job) -> Job:
    """Wait for the end of a job."""
    wait_for("the end of the job", lambda: not job.is_busy)
    return job


def begin(job: Job) -> Job:
    """Wait until a job that runs :data:`SAVING` can be stopped."""
    wait_for("the job", lambda: "began" in job.output)
    return job


def test_a_command_runs_in_a_process_of_its_own_that_a_new_studio_knows(tmp_path: Path) -> None:
    job = end(jobs.start(tmp_path, "look", "cats", ["--version"], {"folder": "<b>"}))
    assert job.code == 0
    assert job.output.startswith("rectified-flow-trainer")
    assert jobs.newest(tmp_path, "look", "cats") == job
    assert job.choices == {"folder": "<b>"}


def test_a_command_that_is_refused_has_its_exit_code_and_its_words(tmp_path: Path) -> None:
    job = end(jobs.start(tmp_path, "look", "cats", ["train", "--budget", "never"]))
    assert job.code == 2
    assert "--budget" in message(job)


def test_one_job_trains_at_a_time_in_the_order_in_which_they_were_asked_for(ask: Callable[..., Job]) -> None:
    first, second = begin(ask(SAVING)), ask("print('second')")
    assert jobs.queue(first.folder.parents[3]) == [first, second]
    assert (first.has_begun, second.has_begun) == (True, False)
    first.stop()
    assert (end(first).output, first.code) == ("began\nsaved\n", 0)
    assert (end(second).output, second.code) == ("second\n", 0)


def test_a_job_that_is_stopped_in_line_never_begins(ask: Callable[..., Job], tmp_path: Path) -> None:
    first, second = begin(ask(SAVING)), ask("print('second')")
    second.stop()
    jobs.resume(tmp_path)
    assert (end(second).output, second.code, second.has_begun) == ("", None, False)
    assert first.is_busy


def test_a_job_whose_process_is_unknown_stops_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be removed between two looks at it, and a PID of -1 stands for all processes."""
    killed = list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(Job, "is_busy", True)
    job = Job(tmp_path / "1.5", "train", "cats", [])
    job.folder.mkdir()
    job.stop()
    assert job.is_stopping
    assert killed == []


def test_other_commands_do_not_wait_for_a_training(ask: Callable[..., Job]) -> None:
    training, drawing = begin(ask(SAVING)), ask("print('drawn')", "draw")
    assert end(drawing).output == "drawn\n"
    assert training.is_busy


def test_nothing_starts_twice(ask: Callable[..., Job]) -> None:
    job = begin(ask(SAVING))
    jobs.execute(job)
    job.stop()
    end(job)
    jobs.execute(job)
    assert job.output == "began\nsaved\n"


def test_a_job_that_is_killed_waits_again_if_it_had_not_begun(ask: Callable[..., Job], tmp_path: Path) -> None:
    first, second = begin(ask(SAVING)), ask("print('second')")
    for job in (first, second):
        os.kill(job.pid, signal.SIGKILL)
        end(job)
    assert (first.code, message(first)) == (None, message(second))
    assert "was killed" in message(first)
    jobs.resume(tmp_path)
    assert end(second).output == "second\n"
    assert not first.is_busy


def test_another_process_with_the_number_of_a_job_is_not_stopped(ask: Callable[..., Job]) -> None:
    job = begin(ask(SAVING))
    os.utime(job.folder / jobs.PROCESS, (1, 1))
    job.stop()
    assert not job.is_busy
    assert psutil.pid_exists(job.pid)
    os.kill(job.pid, signal.SIGKILL)


def test_a_failure_has_its_exit_code_and_its_words(ask: Callable[..., Job]) -> None:
    job = end(ask("print('train: error: no pictures'); sys.exit(1)", "look"))
    assert (job.code, job.output, message(job)) == (1, "train: error: no pictures\n", "no pictures")


def test_what_a_command_wrote_is_packed(ask: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "cats/page").mkdir(parents=True)
    (tmp_path / "cats/page/index.html").write_text("<p>")
    job = end(ask("", "page", str(tmp_path / "cats/page")))
    assert (job.code, job.zip.name, job.zip.exists()) == (0, "cats-page.zip", True)


def test_a_disk_too_full_for_a_zip_is_a_sentence(ask: Callable[..., Job], tmp_path: Path) -> None:
    job = end(ask("print('written'); jobs.make_archive = fill", "page", str(tmp_path / "page")))
    assert (job.code, job.zip.exists()) == (1, False)
    sentence = "cats-page.zip cannot be written (No space left on device): make room on the disk, and try again"
    assert message(job) == sentence


def test_only_the_newest_ended_jobs_are_kept(ask: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEPT", 2)
    for number in range(4):
        end(ask(f"print({number})", "look"))
    last = ask("", "look")
    assert len(jobs.jobs(last.folder.parents[3])) == 3


def test_jobs_are_where_the_folder_of_the_runs_is_now(ask: Callable[..., Job], tmp_path: Path) -> None:
    end(ask("print(1)"))
    moved = (tmp_path / jobs.STUDIO).rename(tmp_path / "moved").parent / "moved"
    (moved / "runs").mkdir()
    (moved / "jobs").rename(moved / "runs" / "jobs")
    (moved / "runs").rename(moved / jobs.STUDIO)
    [job] = jobs.jobs(moved)
    assert (job.code, job.has_begun, job.output) == (0, True, "1\n")
    jobs.resume(moved)


def test_a_machine_that_shares_the_folder_has_its_own_jobs(
    ask: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("")
    assert len(jobs.jobs(tmp_path)) == 1
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert jobs.jobs(tmp_path) == []
