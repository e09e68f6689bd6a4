"""Tests of the sets of pictures on which studies are measured."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from studies import judging_sets
from studies.judging_sets import stamps, write_crops, write_stamps


def test_crops_are_parts_of_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging_sets, "COUNT", 5)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 200, 300, 3), dtype=np.uint8)
    pixels[0, :, :, 1:] = 0  # a red picture, and a blue one that is half flat
    pixels[1, :, :, :2] = 0
    pixels[1, :, :150] = 0
    files = [tmp_path / "red.png", tmp_path / "blue.png"]
    for file, picture in zip(files, pixels, strict=True):
        Image.fromarray(picture).save(file)
    for folder in ("sets", "again"):
        (tmp_path / folder).mkdir()
        write_crops(files, tmp_path / folder)
    crops = [np.asarray(Image.open(file)) for file in sorted((tmp_path / "sets").iterdir())]
    assert [crop.shape for crop in crops] == [(128, 128, 3)] * 5
    assert ["red" if crop[..., 0].any() else "blue" for crop in crops] == ["red", "blue", "red", "blue", "red"]
    assert all((crop > 0).any() for crop in crops)
    names = [file.name for file in sorted((tmp_path / "sets").iterdir())]
    assert all((tmp_path / "sets" / each).read_bytes() == (tmp_path / "again" / each).read_bytes() for each in names)


def test_stamps_lie_on_white_and_letters_are_left_out(tmp_path: Path) -> None:
    for name, size in (
        ("animals/cat.png", (80, 40)),
        ("animals/cat_mirror.png", (80, 40)),
        ("animals/ant.png", (20, 20)),
        ("symbols/letters/a.png", (90, 90)),
        ("symbols/money/euro.png", (90, 90)),
        ("vehicles/train.png", (400, 100)),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", size, (0, 0, 200, 255)).save(tmp_path / name)
    files = stamps(tmp_path)
    assert [file.stem for file in files] == ["cat", "train", "euro"]
    (tmp_path / "set").mkdir()
    write_stamps(files, tmp_path / "set")
    cat, train, euro = (np.asarray(Image.open(file)) for file in sorted((tmp_path / "set").iterdir()))
    assert cat.shape == train.shape == euro.shape == (128, 128, 3)
    assert (cat[0, 0] == 255).all()
    assert ((cat == (0, 0, 200)).all(axis=2).sum(), (train[64] == (0, 0, 200)).all()) == (80 * 40, True)
