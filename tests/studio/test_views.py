"""Tests of the commands and the words of the page."""

import re
import time
from pathlib import Path

import pytest

from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.studio import commands, jobs, runs, views
from rectified_flow.studio.jobs import Job
from rectified_flow.studio.runs import Run
from tests.studio.test_runs import status, write

HOSTILE = "<img src=x onerror=alert(1)>"


def test_the_words_of_a_training_are_those_of_the_program(tmp_path: Path) -> None:
    data = commands.data_flags(str(tmp_path))
    words = commands.train(Path("runs/cats"), data, 12, {"condition_on": ["size"], "use_cfg": True, "dim": ["8"]})
    values = read_settings(TrainConfig, "", words[1:]).values
    assert (values.program.budget, values.data.dataset_path) == ("12m", tmp_path)
    assert (values.columns.condition_on, values.network.use_cfg, values.network.dim) == (("size",), True, 8)
    assert "--budget" not in commands.train(Path("runs/cats"), data, 12, {"num_epochs": ["2"]})
    assert "synthetic-flowers" in commands.train(Path("runs/f"), commands.data_flags(commands.DRAWN_FLOWERS), 8, {})


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "-x" * 40, HOSTILE, "a\nb"])
def test_a_run_has_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(UsageError, match="The name may have letters"):
        commands.run_name(name)


def test_a_name_may_have_spaces_and_letters_of_any_script() -> None:
    assert commands.run_name(" Meine Blüten 2 ") == "Meine Blüten 2"


def test_a_folder_that_is_missing_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder on this machine"):
        commands.data_flags(str(tmp_path / "gone"))


def test_a_folder_is_found_from_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may be resumed by a studio that is started in another folder."""
    (tmp_path / "cats").mkdir()
    monkeypatch.chdir(tmp_path)
    assert commands.data_flags("cats") == {"dataset_path": tmp_path / "cats"}


def test_conditions_become_flags_of_sample(tmp_path: Path) -> None:
    conditions = {
        "labels": {"kind": "Labels", "num_classes": 1, "names": ["cat"]},
        "text": {"encoder": {}, "examples": ["a"]},
    }
    write(tmp_path, runs.CONFIG, {"training": {}, "flow": {"network": {"conditions": conditions}}})
    words = commands.draw(
        Run(tmp_path.parent, tmp_path.name), {"labels": "cat", "text": "a red cat"}, {"nearest": True, "seed": 3}
    )
    assert words == [
        "sample",
        "--checkpoint",
        str(tmp_path),
        *["--set", "labels=cat", "--prompt"],
        "a red cat",
        "--nearest",
        "--seed",
        "3",
    ]


def test_a_finished_run_is_extended_by_its_speed(tmp_path: Path) -> None:
    write(tmp_path, runs.CONFIG, {"training": {"method": "rectified"}})
    write(tmp_path, runs.STATUS, status("finished", step=10))
    with pytest.raises(UsageError, match="too short to know its speed"):
        commands.extend(Run(tmp_path.parent, tmp_path.name), 1)
    write(tmp_path, runs.STATUS, status("finished", step=10, step_time=2.0))
    assert "--train_num_steps 40" in " ".join(commands.extend(Run(tmp_path.parent, tmp_path.name), 1))


def test_a_one_step_run_is_continued_with_its_teacher(tmp_path: Path) -> None:
    """The program refuses the method without a teacher, before it reads the flags that the run has recorded."""
    write(tmp_path, runs.CONFIG, {"training": {"method": "distill", "teacher": "/runs/cats"}})
    words = commands.resume(Run(tmp_path.parent, tmp_path.name))
    flags = read_settings(TrainConfig, "", words[1:]).values
    assert (flags.method, flags.teacher.teacher) == ("distill", Path("/runs/cats"))


def job_of(folder: Path, output: str, code: int | None = None) -> Job:
    folder.mkdir(parents=True)
    (folder / jobs.OUTPUT).write_text(output)
    if code is not None:
        (folder / jobs.ENDED).write_text(str(code))
    return Job(folder, "look", "cats", ["train", "--dry_run", "--output_dir", "runs/a"])


def test_the_plan_of_a_dry_run_is_read_and_its_sheet_is_kept(tmp_path: Path) -> None:
    write(
        tmp_path,
        "plan.json",
        {"flags": {"image_size": 128, "train_num_steps": 1900, "global_batch_size": 32, "batch_size": None}},
    )
    (tmp_path / "sheet.png").write_bytes(b"png")
    job = job_of(tmp_path / "1.5", f"data sheet  {tmp_path}/sheet.png\nplan        {tmp_path}/plan.json\n", 0)
    text = views.plan_words(runs.document(views.file_of(job, views.PLAN)), time.time() + 90)
    assert re.fullmatch(
        r"128 px, about 61,000 images shown to the network, ready at \d\d:\d\d \(in 1.5 minutes\)", text
    )
    assert views.plan_words(runs.document(views.file_of(job, views.PLAN)), None).endswith("network")
    kept = views.file_of(job, views.SHEET)
    (tmp_path / "sheet.png").unlink()
    assert kept.read_bytes() == b"png"
    assert commands.looked_at(job.words, "b") == ["train", "--output_dir", "runs/b"]


def test_an_error_is_shown_without_the_name_of_the_program(tmp_path: Path) -> None:
    job = job_of(tmp_path / "1.5", f"recipe\nrectified-flow train: error: {HOSTILE} holds no pictures\n", 2)
    shown = views.job_card(job, "Looking", "")
    assert "&lt;img src=x onerror=alert(1)&gt; holds no pictures" in shown
    assert "error:" not in shown
    assert "<img" not in shown


@pytest.mark.parametrize(
    ("state", "title"),
    [("finished", "Finished"), ("failed", "Failed"), ("interrupted", "Stopped"), ("running", "Training")],
)
def test_the_card_of_a_run_escapes_what_it_shows(tmp_path: Path, state: str, title: str) -> None:
    folder = tmp_path / "cats"
    write(folder, runs.CONFIG, {"training": {}})
    write(folder, runs.STATUS, status(state, message=HOSTILE, **({"host": HOSTILE} if state == "running" else {})))
    shown = views.run_card(Run(tmp_path, "cats"))
    assert title in shown
    assert "<img" not in shown


def test_warnings_of_a_training_are_shown_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "cats")
    run.job = job_of(tmp_path / "1.5", "warning: the disk is full\nx\nwarning: the disk is full\nwarning: <b>\n")
    assert "<li>the disk is full</li><li>&lt;b&gt;</li></ul>" in views.run_card(run)


def test_a_long_list_of_warnings_is_cut_to_the_newest(tmp_path: Path) -> None:
    run = Run(tmp_path, "cats")
    run.job = job_of(tmp_path / "1.5", "".join(f"warning: could not save step {step}\n" for step in range(99)))
    shown = views.run_card(run)
    assert "step 98<" in shown
    assert shown.count("<li>") == views.WARNINGS


def test_a_sentence_with_another_error_in_it_is_whole_and_gives_advice_for_the_page(tmp_path: Path) -> None:
    problem = "could not save the last step to cats (Error while serializing: I/O error: No space)"
    output = f"rectified-flow: error: {problem}: make room, and run the same command to resume\n"
    job = job_of(tmp_path / "1.5", output, 1)
    assert views.message(job) == f"{problem}: make room, and press Resume"
    few = "warning     576 images are too few for samples that look like pictures: pass a longer --budget\n"
    assert views.warnings(job_of(tmp_path / "1.6", few, 0))[0].endswith("pictures: train for longer")


def test_advice_for_the_page_is_in_place_of_sentences_that_the_program_has() -> None:
    package = Path(views.__file__).parents[1]
    code = "".join(path.read_text() for path in package.rglob("*.py") if path != Path(views.__file__))
    for advice in views.ON_PAGE:
        assert advice in code


def test_a_command_is_shown_as_a_shell_takes_it() -> None:
    assert "sample --prompt &#x27;a &lt;b&gt;&#x27;\nhf" in views.terminal("", ["sample", "--prompt", "a <b>"], ["hf"])


def test_the_hub_gets_the_page_as_a_space_and_the_folder_of_diffusers() -> None:
    create, upload = commands.publish(Path("runs/my cats/one-step/page"), "page", "my cats/one-step")
    name = "YOUR_NAME/my-cats-one-step"
    assert create == ["hf", "repos", "create", name, "--repo-type", "space", "--space-sdk", "static"]
    assert upload[2:4] == [name, "runs/my cats/one-step/page"]
    assert commands.publish(Path("d"), "diffusers", "cats") == [["hf", "upload", "YOUR_NAME/cats", "d"]]
    assert commands.publish(Path("o"), "onnx", "cats") == []
