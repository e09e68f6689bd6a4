"""Tests of the layers of settings: where a value comes from when a run begins, resumes, or has a teacher or a file."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from accelerate import PartialState

from rectified_flow.cli import record
from rectified_flow.cli.distill import Recipe
from rectified_flow.cli.model_flags import EvaluateConfig, ExportConfig, SampleConfig, WatchConfig
from rectified_flow.cli.record import distillation_of, with_record
from rectified_flow.cli.settings import Settings, read_settings
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.data.store import RECIPE_FILE
from rectified_flow.errors import UsageError
from rectified_flow.flags import recorded
from rectified_flow.runs import checkpoint
from rectified_flow.studio.flags import StudioConfig


def settings_of(words: str, kind: type[TrainConfig] = TrainConfig) -> Settings[TrainConfig]:
    PartialState()
    return read_settings(kind, "", words.split())


def save(run: Path, step: int = 1, **flags: Any) -> Path:
    """Save a checkpoint of a run that records these flags, and all others at their defaults."""
    document = {"data": {}, "flow": {}, "training": recorded(settings_of("").values) | flags}
    return checkpoint.save(run / "checkpoints", step, {}, {checkpoint.CONFIG_FILE: document})


def origins(settings: Settings[TrainConfig], *names: str) -> list[str]:
    return [settings.origin(name) for name in names]


def test_the_uppermost_layer_that_has_a_value_counts() -> None:
    settings = Settings(TrainConfig, {"given": {"dim": 8}, "chosen": {"dim": 16, "holdout": 0.2, "seed": 1}})
    settings = settings.with_layer("recorded", {"seed": 2, "image_size": 32})
    values = settings.values
    assert (values.network.dim, values.data.holdout, values.run.seed, values.data.image_size) == (8, 0.2, 1, 32)
    assert origins(settings, "dim", "holdout", "seed", "image_size", "crop") == [
        *("given", "chosen", "chosen", "recorded", "default"),
    ]
    assert settings.given == {"dim"}
    assert {"dim", "dim_mults", "network"} <= settings.fixed
    assert "holdout" not in settings.fixed


def test_a_value_hides_what_it_excludes_in_the_layers_below() -> None:
    settings = Settings(TrainConfig, {"recorded": {"train_num_steps": 9}, "given": {"num_epochs": 2.0}})
    assert (settings.values.run.num_epochs, settings.values.run.train_num_steps) == (2.0, None)
    assert settings.origin("train_num_steps") == "default"


def test_a_value_that_is_resolved_stays_in_its_layer() -> None:
    settings = settings_of("--image_size 0").resolving({"image_size": 48, "aspect_ratio": "3:2"})
    assert origins(settings, "image_size", "aspect_ratio") == ["given", "chosen"]
    assert settings.values.data.image_size == 48


def test_origins_after_a_resume(tmp_path: Path) -> None:
    """A value that a plan chose is recorded after a resume, not given: it does not refuse what a plan may leave out."""
    run = tmp_path / "run"
    save(run, holdout=0.2, dim=24, method="rectified", data_seed=7)
    settings, has_begun = with_record(settings_of(f"--output_dir {run} --learning_rate 1e-4"))
    assert has_begun
    assert origins(settings, "holdout", "dim", "data_seed", "learning_rate", "output_dir") == [
        *("recorded", "recorded", "recorded", "given", "given"),
    ]
    assert (settings.values.data.holdout, settings.values.data.data_seed) == (0.2, 7)
    assert "holdout" not in settings.given


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_after_a_plan_every_setting_is_recorded_or_given(tmp_path: Path, has_checkpoint: bool) -> None:
    """Also after a kill while the data of a teacher are drawn, before the first checkpoint; no plan is made anew."""
    source, run = save(tmp_path / "teacher", dim=24), tmp_path / "run"
    given = "--method reflow --seed 5 --output_dir " + str(run)
    begun, _ = with_record(settings_of(f"{given} --teacher {tmp_path}/teacher"))
    planned = begun.with_layer("chosen", {"global_batch_size": 24, "train_num_steps": 70, "optimizer": ("muon",)})
    flags = recorded(planned.values)
    distilled = distillation_of(planned.values)
    assert distilled is not None
    stored = SimpleNamespace(kind=distilled.kind, source=str(source))
    if has_checkpoint:
        save(run, **flags)
    else:
        run.mkdir()
        (run / checkpoint.CONFIG_FILE).write_text(json.dumps({"data": {}, "flow": {}, "training": flags}))
    with patch.object(record, "recipe_of", lambda _: None if has_checkpoint else stored):
        resumed, has_begun = with_record(settings_of(f"{given} --teacher {tmp_path}/teacher"))
    assert has_begun
    layers = {name: resumed.origin(name) for name in flags}
    assert {name for name, layer in layers.items() if layer == "given"} == {"method", "seed", "teacher"}
    assert set(layers.values()) == {"given", "recorded", "default"}, "a default is excluded by another flag"
    chosen = ("global_batch_size", "train_num_steps", "optimizer", "dim", "data_seed")
    assert origins(resumed, *chosen) == ["recorded"] * len(chosen)
    assert recorded(resumed.values) == flags


def test_origins_of_a_run_that_begins(tmp_path: Path) -> None:
    settings, has_begun = with_record(settings_of(f"--output_dir {tmp_path}/new --seed 5", OneStepConfig))
    assert not has_begun
    assert origins(settings, "method", "data_seed", "lr_decay", "seed", "dim") == [
        *("chosen", "chosen", "chosen", "given", "default"),
    ]
    assert (settings.values.flow.method, settings.values.data.data_seed) == ("mean_flow", 5)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", ["chosen", "chosen", "chosen"]),
        ("--image_size 192", ["given", "chosen", "chosen"]),
        ("--degrade grey", ["default", "default", "default"]),
    ],
)
def test_the_size_is_that_of_the_run_of_the_initial_weights(more: str, expected: list[str], tmp_path: Path) -> None:
    save(tmp_path / "pets", image_size=128, autoencoder=["small"])
    words = f"--init_from {tmp_path}/pets --dataset_path {tmp_path} --output_dir {tmp_path}/cats {more}"
    settings, _ = with_record(settings_of(words))
    assert origins(settings, "image_size", "aspect_ratio", "autoencoder") == expected
    assert settings.values.data.autoencoder == (() if "grey" in more else ("small",))


def test_origins_with_a_teacher(tmp_path: Path) -> None:
    source = save(tmp_path / "teacher", dim=24, image_size=16, data_seed=3, augment=0.15, holdout=0.2)
    words = f"--teacher {tmp_path}/teacher --output_dir {tmp_path}/student"
    settings, _ = with_record(settings_of(words, OneStepConfig))
    assert origins(settings, "dim", "image_size", "data_seed", "teacher") == ["teacher", "teacher", "teacher", "given"]
    values = settings.values
    assert (values.network.dim, values.data.image_size, values.data.augment) == (24, 16, 0.0)
    assert values.data.holdout == 0.2, "the student never sees the pictures that the teacher has not seen"
    assert (values.teacher.teacher, values.data.data_seed) == (source, 3)


def test_origins_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.json"
    file.write_text(json.dumps({"dim": 24, "seed": 4, "learning_rate": 3e-4}))
    settings = settings_of(f"--config {file} --seed 5")
    assert origins(settings, "dim", "seed", "learning_rate", "batch_size") == ["file", "given", "file", "default"]
    assert settings.given == {"dim", "seed", "config", "learning_rate"}, "also at its default"
    assert settings.changed == {"dim", "seed", "config"}


def test_a_run_is_repeated_by_its_file(tmp_path: Path) -> None:
    """Values that the program would choose for a new run are those of the file, at their defaults, too."""
    begun, _ = with_record(settings_of(f"--output_dir {tmp_path}/a --lr_decay none --no_grey", OneStepConfig))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"training": recorded(begun.values)}))
    again, _ = with_record(settings_of(f"--config {file} --output_dir {tmp_path}/b", OneStepConfig))
    assert again.values.run.lr_decay == begun.values.run.lr_decay == "none"
    assert {"grey", "horizontal_flip", "lr_decay"} <= again.given
    assert recorded(again.values) == recorded(begun.values)


def test_a_run_by_the_file_of_another_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"training": recorded(settings_of(f"--checkpoint_dir {tmp_path}/theirs").values)}))
    run = settings_of(f"--config {file} --output_dir {tmp_path}/b").values.run
    assert run.checkpoints == tmp_path / "b/checkpoints"


def test_a_student_is_repeated_by_its_file(tmp_path: Path) -> None:
    save(tmp_path / "teacher", dim=24, data_seed=3, holdout=0.2, horizontal_flip=False, augment=0.15)
    words = f"--teacher {tmp_path}/teacher --output_dir {tmp_path}/student"
    begun, _ = with_record(settings_of(words, OneStepConfig))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"training": recorded(begun.values)}))
    again, _ = with_record(settings_of(f"--config {file} --output_dir {tmp_path}/again", OneStepConfig))
    assert again.values.data == begun.values.data
    save(tmp_path / "student", **recorded(begun.values))
    with pytest.raises(UsageError, match=r"--holdout has no effect with --teacher: the run inherits --holdout 0\.2"):
        with_record(settings_of(f"{words} --holdout 0.5", OneStepConfig))
    assert with_record(settings_of(words, OneStepConfig))[0].values.data.holdout == 0.2
    with pytest.raises(UsageError, match="--dim has no effect with --teacher: the run inherits --dim 24"):
        with_record(settings_of(f"--config {file} --dim 16 --output_dir {tmp_path}/again", OneStepConfig))


def store_paths(student: Path, teacher: Path, **recipe: Any) -> None:
    """Write the recipe of paths that a teacher has drawn for a student."""
    checkpoint_of_teacher = checkpoint.resolve(teacher, [checkpoint.CONFIG_FILE])
    values: dict[str, Any] = {"pairs": 24, "steps": 8, "seed": 0, "points": 8, "solver": "ab2", **recipe}
    values |= {"source": str(checkpoint_of_teacher), "teacher": checkpoint.fingerprint(checkpoint_of_teacher)}
    (student / "paths").mkdir(parents=True)
    (student / "paths" / RECIPE_FILE).write_text(json.dumps(asdict(Recipe(**values))))


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_student_goes_on_with_a_copy_of_its_teacher_and_with_no_other(tmp_path: Path, has_checkpoint: bool) -> None:
    save(tmp_path / "a", dim=24, seed=1)
    save(tmp_path / "b", dim=24, seed=2)
    student = tmp_path / "a/one-step"
    flags = recorded(
        with_record(settings_of(f"--teacher {tmp_path}/a --output_dir {student}", OneStepConfig))[0].values
    )
    store_paths(student, tmp_path / "a")
    if has_checkpoint:
        save(student, **flags)
    (student / checkpoint.CONFIG_FILE).write_text(json.dumps({"data": {}, "flow": {}, "training": flags}))
    words = f"--output_dir {student} --teacher"
    with pytest.raises(UsageError, match=f"--teacher .*/b has no effect|contains paths of {tmp_path}/a"):
        with_record(settings_of(f"{words} {tmp_path}/b", OneStepConfig))
    assert with_record(settings_of(f"{words} {tmp_path}/a", OneStepConfig))[1]
    (tmp_path / "a").rename(tmp_path / "moved")
    words = f"--output_dir {tmp_path}/moved/one-step --teacher {tmp_path}/moved"
    settings, has_begun = with_record(settings_of(words, OneStepConfig))
    assert has_begun
    assert settings.values.teacher.teacher == checkpoint.resolve(tmp_path / "moved", [checkpoint.CONFIG_FILE])


def test_a_second_student_takes_the_paths_that_are_there(tmp_path: Path) -> None:
    """Their number may be one that a plan chose, and not the default."""
    save(tmp_path / "teacher", dim=24)
    store_paths(tmp_path / "first", tmp_path / "teacher", steps=4, points=4)
    words = f"--teacher {tmp_path}/teacher --teacher_dir {tmp_path}/first/paths --output_dir {tmp_path}/second"
    distilled = distillation_of(with_record(settings_of(words, OneStepConfig))[0].values)
    assert distilled is not None
    assert (distilled.recipe.pairs, distilled.recipe.steps, distilled.recipe.points) == (24, 4, 4)
    distilled = distillation_of(with_record(settings_of(f"{words} --teacher_samples 9", OneStepConfig))[0].values)
    assert distilled is not None
    assert distilled.recipe.pairs == 9, "which is then refused"


@pytest.mark.parametrize("given", ["", "--gradient_accumulation_steps 2"])
def test_a_recorded_batch_is_split_again(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    save(run, global_batch_size=16, batch_size=8, gradient_accumulation_steps=2)
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    settings, _ = with_record(settings_of(f"--output_dir {run} {given}"))
    batch = settings.values.run
    assert (batch.global_batch_size, batch.batch_size) == (16, 8)
    assert batch.gradient_accumulation_steps == (2 if given else None)


@pytest.mark.parametrize(
    ("kind", "words", "hint"),
    [
        (TrainConfig, "--folder DIR", "--folder: pass --dataset_path\n"),
        (TrainConfig, "--lr=1e-3", "--lr: pass --learning_rate\n"),
        (TrainConfig, "DIR --seed 1", "DIR: pass --dataset_path DIR\n"),
        (TrainConfig, "--seed 1 DIR", "DIR: pass --dataset_path DIR\n"),
        (SampleConfig, "RUN", "RUN: pass --checkpoint RUN\n"),
        (EvaluateConfig, "RUN", "RUN: pass --checkpoint RUN\n"),
        (SampleConfig, "--model RUN", "--model: pass --checkpoint\n"),
        (ExportConfig, "--folder RUN", "--folder: pass --checkpoint\n"),
        (SampleConfig, "--lr 2", "--help"),
        (OneStepConfig, "RUN", "RUN: pass --teacher RUN\n"),
        (OneStepConfig, "--model RUN", "--model: pass --teacher\n"),
        (OneStepConfig, "--checkpoint RUN", "--checkpoint: pass --teacher\n"),
        (TrainConfig, "--model RUN", "--model: pass --init_from\n"),
        (TrainConfig, "--checkpoint=RUN", "--checkpoint: pass --init_from\n"),
        (TrainConfig, "--dataset-path My Own Cats --seed 1", '"My Own Cats"\n'),
        (
            ExportConfig,
            "--checkpoint my runs",
            '--checkpoint: put the path in quotation marks: --checkpoint "my runs"\n',
        ),
        (SampleConfig, "--from_images tests tests/cli", "--from_images: pass one file, or the folder of the files"),
        (TrainConfig, "--output_dir out tests", "tests: pass --dataset_path tests\n"),
        (SampleConfig, "--classes Häuser, 😀 --checkpoint RUN", "by commas: --classes Häuser,😀\n"),
        (SampleConfig, "--checkpoint RUN --num_samples 4 tests", "Unrecognized options: tests"),
    ],
)
def test_a_hint_names_the_flag_that_was_meant(
    kind: type[Any], words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(kind, "", words.split())
    errors = capsys.readouterr().err
    assert hint in errors
    assert errors.count(": pass ") == hint.count(": pass ")


@pytest.mark.parametrize(
    ("kind", "words", "flag"),
    [
        (TrainConfig, "--exclude a.png --exclude b.png", "exclude"),
        (TrainConfig, "--condition-on=text --condition_on size", "condition_on"),
        (TrainConfig, "--import json --seed 1 --import=csv", "import"),
        (SampleConfig, "--guidance a=1 --guidance b=2", "guidance"),
    ],
)
def test_a_list_that_is_given_twice_is_refused(kind: type[Any], words: str, flag: str) -> None:
    with pytest.raises(UsageError, match=f"--{flag} is given twice: pass all values after one --{flag}$"):
        read_settings(kind, "", words.split())


def test_conditions_that_are_set_one_by_one_all_count() -> None:
    settings = read_settings(SampleConfig, "", ["--set", "a=1", "--set", "b=2", "--seed", "1", "--seed", "2"])
    assert (settings.values.samples.set_, settings.values.samples.seed) == ((("a=1",), ("b=2",)), 2)


def test_words_of_a_time_are_joined() -> None:
    program = settings_of("--dataset_path x --budget 1 h 30 min --one_step").values.program
    assert (program.budget, program.one_step) == ("1 h 30 min", True)


@pytest.mark.parametrize("columns", [1, 4, 9])
def test_the_help_ends_in_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        read_settings(WatchConfig, "", ["--help"])
    assert "usage" in capsys.readouterr().out
    assert os.environ["COLUMNS"] == str(columns)


def test_a_folder_without_a_flag_is_given() -> None:
    assert read_settings(WatchConfig, "", ["elsewhere"]).values.watched.runs == Path("elsewhere")
    assert read_settings(StudioConfig, "", ["elsewhere", "--no_open"]).values.page.runs == Path("elsewhere")
