"""Tests of jobs: commands as processes that outlive the studio, of which one trains at a time."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from threading import Thread

import pytest

from rectified_flow.studio import jobs
from rectified_flow.studio.jobs import Job
from rectified_flow.studio.views import message
from tests.patience import PATIENCE, wait_for

SAVING = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("began", flush=True)
time.sleep(600)
"""


@contextmanager
def kept(job: Job) -> Iterator[None]:
    """Keep a job in this process, as its keeper does in one of its own."""
    thread = Thread(target=jobs.keep, args=(job,))
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Ask for Python code in place of a command of the program; this process is its keeper."""
    monkeypatch.setattr(jobs, "PROGRAM", (sys.executable, "-c"))
    monkeypatch.setattr(jobs, "POLL", 0.02)

    def this_process(job: Job) -> None:
        (job.folder / jobs.KEEPER).write_text(str(os.getpid()))

    monkeypatch.setattr(jobs, "_keep", this_process)
    return lambda code, kind="train", *words: jobs.start(tmp_path, kind, "cats", [code, *words])


def test_a_command_runs_in_a_process_of_its_own_that_a_new_studio_knows(tmp_path: Path) -> None:
    job = jobs.start(tmp_path, "look", "cats", ["--version"], {"folder": "<b>"})
    wait_for("the job", lambda: Job(job.folder).state == "ended")
    assert job.code == 0
    assert job.output.startswith("rectified-flow-trainer")
    assert jobs.newest(tmp_path, "look", "cats") == job
    assert job.command.choices == {"folder": "<b>"}


def test_one_job_trains_at_a_time_in_the_order_in_which_they_were_asked_for(ask: Callable[..., Job]) -> None:
    first, second = ask(SAVING), ask("print('second')")
    with kept(second), kept(first):
        wait_for("the job", lambda: "began" in first.output)
        assert (first.state, second.state) == ("running", "waiting")
        assert jobs.queue(first.folder.parents[3]) == [first, second]
        first.stop()
    assert (first.output, first.code) == ("began\nsaved\n", 0), "asked once to save and end"
    assert (second.output, second.state) == ("second\n", "ended")


def test_a_job_that_is_stopped_in_line_never_begins(ask: Callable[..., Job]) -> None:
    first, second = ask(SAVING), ask("print('second')")
    with kept(first):
        wait_for("the job", lambda: "began" in first.output)
        with kept(second):
            second.stop()
        assert (second.output, second.code, second.has_begun) == ("", None, False)
        first.stop()


def test_other_commands_do_not_wait_for_a_training(ask: Callable[..., Job]) -> None:
    training, drawing = ask(SAVING), ask("print('drawn')", "draw")
    with kept(training):
        with kept(drawing):
            pass
        assert (drawing.code, training.state) == (0, "running")
        training.stop()


def test_nothing_starts_twice(ask: Callable[..., Job]) -> None:
    job = ask("print('once')")
    with kept(job), kept(job):
        pass
    jobs.keep(job)
    assert job.output == "once\n"


def test_a_job_without_keeper_is_lost_and_waits_again_if_it_had_not_begun(ask: Callable[..., Job]) -> None:
    job = ask("print('now')")
    os.utime(job.folder / jobs.KEEPER, (1, 1))
    lost = job.state
    jobs.resume(job.folder.parents[3])
    assert (lost, job.state) == ("lost", "waiting"), "another process has the number of its keeper"


def test_a_command_that_lost_its_keeper_is_asked_to_stop(ask: Callable[..., Job]) -> None:
    process = subprocess.Popen(["sleep", "600"])
    job = ask("")
    (job.folder / jobs.PROCESS).write_text(str(process.pid))
    job.stop()
    time.sleep(0.1)
    assert process.poll() is None, "its keeper asks it"
    os.utime(job.folder / jobs.KEEPER, (1, 1))
    job.stop()
    assert process.wait(PATIENCE) == -signal.SIGTERM
    job.stop()


def test_a_failure_has_its_exit_code_and_its_words(ask: Callable[..., Job]) -> None:
    job = ask("import sys; sys.exit('train: error: no pictures')", "look")
    with kept(job):
        pass
    assert (job.code, job.output) == (1, "train: error: no pictures\n")


def test_what_a_command_wrote_is_packed(ask: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "cats/page").mkdir(parents=True)
    (tmp_path / "cats/page/index.html").write_text("<p>")
    job = ask("", "take", str(tmp_path / "cats/page"))
    with kept(job):
        pass
    assert job.zip.name == "cats-page.zip"
    assert job.zip.exists()


def test_a_disk_too_full_for_a_zip_is_a_sentence(
    ask: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(name: str, *_: object) -> None:
        Path(f"{name}.zip").write_text("x")
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(jobs, "make_archive", fill)
    job = ask("print('written')", "take", str(tmp_path / "page"))
    with kept(job):
        pass
    assert (job.code, job.zip.exists()) == (1, False)
    sentence = "cats-page.zip cannot be written (No space left on device): make room on the disk, and try again"
    assert message(job) == sentence


def test_only_the_newest_ended_jobs_are_kept(ask: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEPT", 2)
    for number in range(5):
        with kept(ask(f"print({number})", "look")):
            pass
    last = ask("", "look")
    assert len(jobs.jobs(last.folder.parents[3])) == 3


def test_a_machine_that_shares_the_folder_has_its_own_jobs(
    ask: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("")
    assert len(jobs.jobs(tmp_path)) == 1
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert jobs.jobs(tmp_path) == []
