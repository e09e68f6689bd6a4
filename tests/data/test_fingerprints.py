"""Tests of stores that follow their files: equal names, sizes and times never make two folders share a store."""

import io
import os
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from rectified_flow.data.open import open_dataset
from rectified_flow.data.sources import listing as folders

TIME = 1_600_000_000


def first_pixel(folder: Path) -> int:
    return int(open_dataset(str(folder), image_size=8).entries["images"][0, 0, 0, 0])


def picture(path: Path, value: int) -> Path:
    """A file whose size and time of modification do not depend on the value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".bmp":
        Image.new("RGB", (8, 8), (value, 0, 0)).save(path)
    else:
        content = io.BytesIO()
        Image.new("RGB", (8, 8), (value, 0, 0)).save(content, "BMP")
        rows = {"image": [{"bytes": content.getvalue(), "path": None}]}
        features = datasets.Features({"image": datasets.Image()})
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    os.utime(path, (TIME, TIME))
    return path


@pytest.mark.parametrize("name", ["0.bmp", "train.parquet"])
def test_two_folders_with_equal_names_sizes_and_times_have_stores_of_their_own(tmp_path: Path, name: str) -> None:
    one, other = (picture(tmp_path / version / "frames" / name, value) for version, value in (("v1", 40), ("v2", 90)))
    assert one.stat().st_size == other.stat().st_size
    assert [first_pixel(file.parent) for file in (one, other, one)] == [40, 90, 40]


@pytest.mark.parametrize("name", ["0.bmp", "train.parquet"])
def test_a_file_that_is_changed_in_place_is_read_again(tmp_path: Path, name: str) -> None:
    """Such as by ``rsync --times`` or ``unzip``: the size and the time of modification stay."""
    for value in (40, 90):
        file = picture(tmp_path / "frames" / name, value)
        assert first_pixel(file.parent) == value


def fingerprint(folder: Path) -> str:
    return folders.files_fingerprint(folder, folders.find_files(folder))


def test_the_time_of_a_change_is_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_sample", lambda *_: b"")
    file = tmp_path / "0.npy"
    for _ in range(2):
        np.save(file, np.zeros(8))
        os.utime(file, (TIME, TIME))
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    changed = np.ones(8)
    np.save(file, changed)
    os.utime(file, (TIME, TIME))
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize("at", [0, 6_000, 11_999])
def test_contents_tell_files_apart_where_no_time_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Some file systems keep no time of the last change of status: only the contents differ."""
    file, stat = tmp_path / "0.npy", os.stat
    file.write_bytes(bytes(12_000))
    same = stat(file)
    monkeypatch.setattr(os, "stat", lambda path, **how: same if str(path) == str(file) else stat(path, **how))
    before = fingerprint(tmp_path)
    content = bytearray(12_000)
    content[at] = 1
    file.write_bytes(content)
    assert fingerprint(tmp_path) != before


def test_no_more_than_some_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1000):
        (tmp_path / f"{number}.npy").write_bytes(b"1")
    opened = list[str]()

    def sample(path: str, _size: int) -> bytes:
        opened.append(path)
        return b""

    monkeypatch.setattr(folders, "_sample", sample)
    fingerprint(tmp_path)
    assert folders.SAMPLED / 2 <= len(opened) <= folders.SAMPLED
