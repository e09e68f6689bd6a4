"""Tests of the state of runs as the studio reads it."""

import json
import os
import platform
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rectified_flow.registry import Document
from rectified_flow.runs import folder as run_folder
from rectified_flow.runs.checkpoint import CONFIG_FILE
from rectified_flow.studio import jobs, runs, views
from rectified_flow.studio.runs import Run
from rectified_flow.training import copies
from tests.patience import PATIENCE

CONDITIONS: dict[str, Document] = {
    "labels": {"kind": "Labels", "num_classes": 2, "names": ["cat", "<b>dog"]},
    "size": {"kind": "Number", "quantiles": [1.0, 2.0, 8.0]},
    "text": {"kind": "Caption", "encoder": {}, "examples": ["a red cat"]},
}


def write(folder: Path, name: str, document: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(document))


def status(state: str, **more: object) -> dict[str, object]:
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {
        "state": state,
        "step": 3,
        "total_steps": 10,
        "time": now,
        "host": platform.node(),
        "pid": os.getpid(),
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(
        tmp_path / "cats",
        runs.CONFIG,
        {"training": {"method": "rectified"}, "flow": {"network": {"conditions": CONDITIONS}}},
    )
    write(tmp_path / "cats", runs.STATUS, status("running"))
    return tmp_path / "cats"


def test_names_of_files_are_those_of_a_run() -> None:
    assert (CONFIG_FILE, run_folder.STATUS_FILE) == (runs.CONFIG, runs.STATUS)
    assert run_folder.SAMPLES == runs.SAMPLES
    assert runs.LOSS in run_folder.RUN_FILES
    assert f"{runs.SAMPLES}/{runs.NEIGHBOURS}" == copies.NEIGHBOURS


def test_a_run_trains_if_its_process_lives_and_is_older_than_its_status(run: Path) -> None:
    assert Run(run.parent, run.name).state == "running"
    write(run, runs.STATUS, status("running", pid=psutil.pids()[-1] + 10_000_000))
    assert Run(run.parent, run.name).state == "interrupted", "it was killed"
    write(run, runs.STATUS, status("running"))
    os.utime(run / runs.STATUS, (1, 1))
    assert Run(run.parent, run.name).state == "interrupted", "another process has its number"


def test_a_run_of_another_machine_is_as_its_status_says(run: Path) -> None:
    write(run, runs.STATUS, status("running", host="elsewhere", pid=1))
    assert (Run(run.parent, run.name).state, Run(run.parent, run.name).is_elsewhere) == ("running", True)


def test_a_run_ends_when_its_status_says(run: Path) -> None:
    run_folder.write_status(run, "running", 4, 10, times=run_folder.times_of(0.5, 60.0))
    found = Run(run.parent, run.name)
    assert found.ends == pytest.approx(time.time() + 60, abs=2)
    assert (found.status["step"], found.status["total_steps"], found.status["step_time"]) == (4, 10, 0.5)
    run_folder.write_status(run, "finished", 10, 10)
    assert (Run(run.parent, run.name).ends, Run(run.parent, run.name).status["step_time"]) == (None, 0.5)


def test_a_folder_that_vanishes_or_is_damaged_has_no_state(tmp_path: Path) -> None:
    gone = Run(tmp_path, "gone")
    assert (gone.state, gone.status, gone.samples, gone.saved) == ("interrupted", {}, {}, 0)
    write(tmp_path / "odd", runs.CONFIG, {"training": {"method": 3}, "flow": [1]})
    odd = Run(tmp_path, "odd")
    assert (odd.status, odd.controls, odd.takes_pictures) == ({}, {}, False)


def test_a_person_sets_classes_numbers_and_captions(run: Path) -> None:
    others = {"source": {"kind": "Picture"}, "augmentation": {"kind": "AugmentationLabels"}}
    write(run, runs.CONFIG, {"training": {}, "flow": {"network": {"conditions": others | CONDITIONS}}})
    assert Run(run.parent, run.name).controls == CONDITIONS
    pytest.importorskip("gradio")
    from rectified_flow.studio.playing import field_of

    labels, size, text = (field_of(name, kind) for name, kind in CONDITIONS.items())
    assert [value for _, value in labels.choices] == ["", "cat", "<b>dog"]
    assert (size.minimum, size.maximum, size.value) == (1.0, 8.0, 4.5)
    assert (text.value, text.placeholder) == ("", "a red cat")


@pytest.mark.parametrize(
    ("kind", "space", "degrade", "can_vary", "can_fill"),
    [
        ("RectifiedFlow", "Pixels", None, True, True),
        ("RectifiedFlow", "LatentsInStep", None, True, True),
        ("RectifiedFlow", "Fields", None, False, False),
        ("MeanFlow", "Pixels", None, False, False),
        ("MeanFlow", "Pixels", "mask:brush", False, True),
    ],
)
def test_what_can_be_done_with_a_picture(
    tmp_path: Path, kind: str, space: str, degrade: str | None, *, can_vary: bool, can_fill: bool
) -> None:
    flow = {"kind": kind, "space": {"kind": space}, "network": {"conditions": {}}}
    write(tmp_path, runs.CONFIG, {"training": {"degrade": degrade}, "flow": flow})
    assert (Run(tmp_path.parent, tmp_path.name).can_vary, Run(tmp_path.parent, tmp_path.name).can_fill) == (
        can_vary,
        can_fill,
    )


def test_runs_and_their_one_step_generators_are_found_newest_first(run: Path) -> None:
    for name in ("cats/one-step", "dogs"):
        write(run.parent / name, runs.CONFIG, {"training": {"method": "distill"}})
    write(run.parent / "other", runs.CONFIG, {"model": 1})
    for age, name in enumerate(("dogs", "cats", "cats/one-step")):
        os.utime(run.parent / name / runs.CONFIG, (age, age))
    assert runs.run_names(run.parent) == ["cats/one-step", "cats", "dogs"]


def trained(run: Path, **files: str) -> Path:
    """Make the job that trains a run, with some of its files, and return its folder."""
    folder = run.parent / jobs.STUDIO / "jobs" / platform.node() / "1.5"
    document = {"folder": str(folder), "kind": "train", "run": run.name, "words": ["train", str(run)]}
    write(folder, jobs.JOB, document)
    for name, text in ({"process": ""} | files).items():
        (folder / name).write_text(text)
    return folder


def test_a_run_is_finished_while_its_job_makes_the_one_step_generator(run: Path) -> None:
    trained(run, process=str(os.getpid()), begun="")
    write(run, runs.STATUS, status("finished"))
    assert Run(run.parent, run.name).state == "finished"
    write(run, runs.STATUS, status("finished", pid=1))
    os.utime(run / runs.STATUS, (1, 1))
    assert Run(run.parent, run.name).state == "preparing", "it is trained for longer"


def test_a_run_that_is_killed_has_failed_unless_it_was_stopped(run: Path) -> None:
    write(run, runs.STATUS, status("running", pid=0))
    job = trained(run, begun="")
    assert Run(run.parent, run.name).state == "failed"
    assert "was killed" in views.run_card(Run(run.parent, run.name))
    (job / jobs.STOP).touch()
    assert Run(run.parent, run.name).state == "interrupted"


@pytest.mark.parametrize("files", [{}, {"begun": "", "ended": "0"}])
def test_a_run_that_is_stopped_before_it_has_a_folder_is_resumed(tmp_path: Path, files: dict[str, str]) -> None:
    trained(tmp_path / "cats", stop="", **files)
    assert Run(tmp_path, "cats").state == "interrupted"
    assert "<p>You can resume" in views.run_card(Run(tmp_path, "cats"))
    gradio = pytest.importorskip("gradio")
    from rectified_flow.studio.watching import WatchTab

    with gradio.Blocks():
        tab = WatchTab(tmp_path, gradio.Dropdown(), gradio.Tabs())
    assert tab.wanted({tab.run: "cats", tab.earlier: 0})[tab.resume]["visible"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_start_process", lambda job: (job.folder / jobs.PROCESS).touch())
        tab.resume_run({tab.run: "cats", tab.more: 10})
    assert [job.words for job in jobs.jobs(tmp_path)] == [["train", str(tmp_path / "cats")]] * 2


def test_a_training_in_a_terminal_outdates_the_job_before_it(run: Path) -> None:
    job = trained(run, begun="", ended="2")
    write(run, runs.STATUS, status("failed", message="the disk is full"))
    os.utime(job / jobs.BEGUN, (time.time() + 1, time.time() + 1))
    assert Run(run.parent, run.name).job is not None
    os.utime(job / jobs.BEGUN, (1, 1))
    assert Run(run.parent, run.name).job is None
    assert "the disk is full" in views.run_card(Run(run.parent, run.name))
    write(run, runs.STATUS, status("interrupted"))
    assert Run(run.parent, run.name).state == "interrupted"


def test_the_step_that_is_saved_is_that_of_the_newest_checkpoint(run: Path) -> None:
    write(run, runs.STATUS, status("running", pid=0, step=990, total_steps=2000))
    assert "990" not in views.run_card(Run(run.parent, run.name))
    for step in ("step_00000400", "step_00000800", "step_00000990.building"):
        write(run / "checkpoints" / step, "manifest.json", {})
    (run / "checkpoints/step_00000900").mkdir()
    assert Run(run.parent, run.name).saved == 800
    assert "Step 800 of 2,000 is saved. You can resume" in views.run_card(Run(run.parent, run.name))


def test_a_run_of_a_terminal_is_asked_to_stop(run: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    write(run, runs.STATUS, status("running", pid=process.pid))
    Run(run.parent, run.name).stop()
    assert process.wait(PATIENCE) == -signal.SIGTERM
    Run(run.parent, run.name).stop()
