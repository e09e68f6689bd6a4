"""Tests of checks of the data of a run before any long computation."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from rectified_flow.cli.data import flags_of_files
from rectified_flow.cli.program_flags import check_outside
from rectified_flow.cli.training_flags import DataConfig
from rectified_flow.errors import UsageError
from tests.programs import assert_refused

TINY = "--image_size 8 --dim 8 --dim_mults 1 --train_num_steps 1 --holdout 0"


def test_classes_in_a_column_of_texts_are_named(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(tmp_path / f"pets/{number}.png")
    words = f"--dataset_path {tmp_path}/pets {TINY} --use_cfg --output_dir {tmp_path}/run --cache_dir {tmp_path}"
    said = "in a subfolder of its own, or pass --condition_on COLUMN=label"
    assert_refused("train_oxford.py", 1, f"{words}/before", said)
    rows = [f"{number}.png,small,{'cat' if number % 2 else 'dog'}" for number in range(4)]
    (tmp_path / "pets/metadata.csv").write_text("\n".join(["file_name,size,label", *rows]))
    said = "or pass --condition_on label=label to use a column of texts as labels"
    assert_refused("train_oxford.py", 1, f"{words}/after", said)
    columns = f"{words}/after --condition_on label=label"
    assert_refused("train_oxford.py", 1, columns, "leave it out; --condition_on works without it")


def test_a_cache_in_the_pictures_is_refused_although_no_flag_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sheet of a dry run, which is beside the store, would be a picture of the next run."""
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    monkeypatch.setenv("RECTIFIED_FLOW_CACHE", str(tmp_path / "cache"))
    words = f"--dataset_path {tmp_path} {TINY} --output_dir {tmp_path.parent}/run --dry_run"
    assert_refused("train_oxford.py", 1, words, f"--cache_dir {tmp_path}/cache lies inside --dataset_path {tmp_path}:")
    assert [path.name for path in tmp_path.iterdir()] == ["0.png"]
    check_outside("dataset_path", tmp_path, cache_dir=tmp_path / ".cache/rectified-flow")  # of a home folder


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("nowhere", path), Path.touch], ids=["FIFO", "dangling link", "empty"]
)
def test_a_first_file_that_is_no_picture_is_named(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "0.png")
    Image.new("RGB", (12, 8)).save(tmp_path / "1.png")
    flags = DataConfig(dataset_path=tmp_path, image_size=0)
    with pytest.raises(UsageError, match=r"--image_size 0 reads the first picture, and .*0\.png is broken \("):
        flags_of_files(flags, may_choose=True)
    found = flags_of_files(DataConfig(dataset_path=tmp_path, image_size=0, skip_broken_images=True), may_choose=True)
    assert (found["image_size"], found["aspect_ratio"]) == (8, "3:2")
