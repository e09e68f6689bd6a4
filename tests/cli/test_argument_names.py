"""Tests of the names of arguments in messages: Python reads the argument, and a person at a terminal reads the flag."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from rectified_flow import open_dataset
from rectified_flow.cli import programs
from rectified_flow.errors import UsageError
from tests.programs import refusal

FOLDER = "`seed` --dim"
"""The name of a folder that looks like an argument, and like a flag."""


def test_an_error_names_the_argument_and_a_program_its_flag(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "1.png")
    with pytest.raises(UsageError) as library:
        open_dataset("", folder, image_size=10, aspect_ratio="3:4")
    sentence = "10 with {}aspect_ratio{} 3:4 gives a fractional long side; pass a multiple of 3"
    assert str(library.value) == "`image_size` " + sentence.format("`", "`")
    flags = ["--dataset_path", str(folder), "--output_dir", str(tmp_path / "run"), "--image_size", "10"]
    said = refusal("train_oxford.py", [*flags, "--aspect_ratio", "3:4"])
    assert said == f"train_oxford.py: error: --image_size {sentence.format('--', '')}\n"


def test_a_program_prints_the_name_of_a_folder_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    said = refusal("train_oxford.py", ["--dataset_path", str(folder), "--output_dir", str(tmp_path / "run")])
    assert f"the folder {folder} holds no pictures" in said


def test_a_program_advises_no_flag_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message of a shared module may name an argument of another program."""

    def serve(_flags: object) -> None:
        raise UsageError("`import`, `image_size` and `points`")

    monkeypatch.setattr(sys, "argv", ["watch.py", "."])
    monkeypatch.setattr(programs, "serve_tensorboard", serve)
    with pytest.raises(SystemExit):
        programs.watch()
    assert capsys.readouterr().err == "watch.py: error: --import, --image_size of rectified-flow train and `points`\n"


def test_a_message_names_the_flag_that_stands_for_an_argument() -> None:
    config = "rectified_flow.cli.model_flags:SampleConfig"
    assert programs._flag_of(config, "dataset_path") == "--nearest"
    assert programs._flag_of("rectified_flow.cli.training_flags:TrainConfig", "limit") == "--max_train_samples"
