"""Tests of rectangles, transparency and crops, and of ``--look``, which creates no run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from rectified_flow.data import open as catalog
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.system.outputs import RECORD
from tests.contract.kinds import COUNT, PLAIN, Runs
from tests.programs import printed
from tests.ranks import run_on_ranks


@pytest.fixture
def runs(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("cutouts")


def printed_of_few(words: str) -> str:
    """Return the printed text of a program whose drawn flowers are few."""
    setattr(catalog, "SyntheticFlowers", partial(SyntheticFlowers, count=64))  # noqa: B010 -- in a process of its own
    return printed(words)


def test_samples_have_transparency_and_the_grid_has_none(runs: Runs, tmp_path: Path) -> None:
    flags = "--num_samples 2 --steps 1 --from_images {data}/cutouts --strength 0.001 --path strip"
    assert runs.call("sample.py", flags, tmp_path) == ""
    drawn = [Image.open(file) for file in sorted(tmp_path.glob("0*.png"))]
    assert [(picture.mode, picture.size) for picture in drawn] == [("RGBA", (12, 8))] * 2
    assert Image.open(tmp_path / "grid.png").mode == "RGB"
    alpha = np.asarray(drawn[0])[..., 3]
    assert alpha[3:5, 4:6].max() < 40, "the hole of the picture that it starts from"
    assert alpha[0].min() > 215


def test_a_look_at_a_folder(runs: Runs, tmp_path: Path) -> None:
    flags = f"{runs.kind.flags.format(data=runs.data)} --look --output_dir {tmp_path}/run"
    first, second = run_on_ranks(2, printed, flags)
    said = dict(row.split(maxsplit=1) for row in first.splitlines())
    assert said["pictures"] == f"cutouts: {COUNT} images of 12x8 px"
    assert (said["sizes"], said["enlarged"]) == ("all 30x24 px", "0 smaller than 15x10 px")
    assert said["sheet"] == f"{tmp_path}/run/look.png: {COUNT} pictures as they are trained on"
    assert second == ""
    sheet = np.asarray(Image.open(tmp_path / "run/look.png"))
    assert (sheet[2:10, 2:14] == 255).all(axis=-1).sum() in range(4, 60), "a hole, over white"
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"look.png", RECORD}


def test_a_look_at_other_sources(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"image": [Image.new("RGB", (10, 10))] * 3, "label": [0, 1, 0]})
    rows.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    for words, number in ((f"--dataset_path {tmp_path}/saved", 3), ("--dataset synthetic-flowers", 64)):
        [text] = run_on_ranks(1, printed_of_few, f"{words} {PLAIN} --output_dir {tmp_path}/{number} --look")
        assert f"{number} images of 8 px" in text
        assert (tmp_path / f"{number}/look.png").exists()
