"""Tests of sources of pictures, and of damaged pictures, odd names, labels and rows, whose errors name them."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from rectified_flow.data.open import OxfordFlowersDataset, open_dataset
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource
from rectified_flow.data.sources.synthetic_flowers import SPECIES, SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import default_cache_dir, open_store
from rectified_flow.errors import DamageError, UsageError
from tests.system.refusing import refusing

LATIN = os.fsdecode(b"caf\xe9")
"""A name as Python reads it from a disk whose names are in Latin-1."""


def picture(red: int = 50) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (10, 8), (red, 100, 200)).save(content, "PNG")
    return content.getvalue()


def save_picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture())
    return path


def save_table(folder: Path, feature: Any, labels: Sequence[int | None], paths: Sequence[str] = ()) -> Path:
    """A Parquet file with any numbers in a column that is said to be ``feature``; rows with a path have no bytes."""
    images: list[dict[str, Any]] = [{"bytes": None, "path": path} for path in paths]
    images = images or [{"bytes": picture(10 * (label or 0) % 256), "path": None} for label in labels]
    schema = datasets.Features({"image": datasets.Image(), "label": feature}).arrow_schema
    folder.mkdir()
    table = pyarrow.Table.from_pydict({"image": images, "label": list(labels)}, schema)
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    return folder


NUMBER, PETS = datasets.Value("int64"), datasets.ClassLabel(names=["cat", "dog"])


def test_the_hubs_layout(tmp_path: Path) -> None:
    folder = save_table(tmp_path / "set", PETS, [1, 0, 1])
    dataset = open_dataset("", folder, image_size=4)
    assert dataset.class_names == ["cat", "dog"]
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.entries["images"][:, 0, 0, 0].tolist() == [10, 0, 10]
    with pytest.raises(UsageError, match='Unknown split "test"'):
        open_dataset("", folder, image_size=4, split="test")


@pytest.mark.parametrize("labels", [[0, -1, 1], [0, None, 1]])
def test_rows_without_a_label_mean_no_classes(tmp_path: Path, labels: list[int | None]) -> None:
    """A hub's test split often has -1, or nothing, for a label."""
    datasets.load_dataset(str(save_table(tmp_path / "set", PETS, labels))).save_to_disk(str(tmp_path / "saved"))
    dataset = open_dataset("", tmp_path / "saved", image_size=4)
    assert len(dataset) == 3
    assert dataset.conditions == {}


def test_oxford_flowers_have_their_true_names(tmp_path: Path) -> None:
    """The hub's class names are Oxford ids in text order: label 1 is id 10."""
    names = sorted(str(number) for number in range(1, 103))
    folder = save_table(tmp_path / "flowers", datasets.ClassLabel(names=names), [0, 1, names.index("54")])
    dataset = OxfordFlowersDataset(4, source=folder)
    assert len(set(dataset.class_names)) == 102
    assert [dataset.class_names[label] for label in dataset.labels] == ["pink primrose", "globe thistle", "sunflower"]


def test_synthetic_flowers_are_distinct_and_repeatable_and_show_their_class() -> None:
    """The mean picture of a class is nearer to its flowers than that of other classes."""
    flowers = SyntheticFlowers(32, count=600)
    drawn = [np.asarray(flowers.load(index)[0]) for index in range(600)]
    assert len({picture.tobytes() for picture in drawn}) == 600
    assert np.array_equal(np.asarray(SyntheticFlowers(32).load(17)[0]), drawn[17])
    assert not np.array_equal(np.asarray(SyntheticFlowers(32, seed=1).load(17)[0]), drawn[17])
    pictures = np.stack(drawn).reshape(600, -1).astype(float)
    labels = np.arange(600) % len(SPECIES)
    means = np.stack([pictures[:360][labels[:360] == label].mean(axis=0) for label in range(len(SPECIES))])
    nearest = ((pictures[360:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == labels[360:]).mean() > 0.9


def test_a_real_folder_is_read_once_whatever_links_to_it(tmp_path: Path) -> None:
    """Two links to the folder itself would otherwise never end."""
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        save_picture(tmp_path / "pics" / name)
    (tmp_path / "pics/self").symlink_to(".")
    (tmp_path / "pics/again").symlink_to(tmp_path / "pics")
    (tmp_path / "pics/a-cat").symlink_to("cat")  # comes first in the alphabet
    save_picture(tmp_path / "elsewhere/4.png")
    (tmp_path / "pics/bird").symlink_to(tmp_path / "elsewhere")
    folder = FileFolder(tmp_path / "pics")
    assert [str(file.relative_to(tmp_path / "pics")) for file in folder.files] == [
        "bird/4.png",
        "cat/1.png",
        "cat/2.png",
        "dog/3.png",
    ]
    assert folder.class_names == ["bird", "cat", "dog"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        save_picture(tmp_path / "pics" / name)
    scandir = os.scandir

    def scan(path: Any) -> Any:  # the rights of a folder do not bind root
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    opened = open_dataset("", tmp_path / "pics", image_size=8, cache_dir=tmp_path / "cache")
    assert len(opened) == 1
    assert "unreadable folders, such as dog" in opened.notes[0]


def test_only_pictures_are_opened_whatever_they_are_called(tmp_path: Path) -> None:
    """Pillow hands an EPS file to another program."""
    save_picture(tmp_path / "pics/1.png")
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "pics/2.png").write_text(eps)
    with pytest.raises(UsageError, match=r"broken image .*2\.png \(cannot identify image file"):
        open_dataset("", tmp_path / "pics", image_size=8, cache_dir=tmp_path / "cache")


def test_a_hub_that_does_not_answer_is_named_before_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = list[str]()

    def wait(*_arguments: Any, **_options: Any) -> None:
        said.append(capsys.readouterr().out)
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", wait)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UsageError, match=r"cannot be read as a dataset \(there is no network"):
        open_dataset("some/pictures", image_size=4)
    assert said[0] == f"reading some/pictures from {huggingface_hub.constants.ENDPOINT}\n"


def test_names_that_are_not_utf8_are_read_and_written_down_as_escapes(tmp_path: Path) -> None:
    for file in (f"{LATIN}/1.png", f"tea/{LATIN}.png"):
        save_picture(tmp_path / "pics" / file)
    (tmp_path / "pics/tea" / f"{LATIN} 2.png").write_bytes(b"no picture")
    with pytest.raises(UsageError, match=r"broken image .*/tea/caf\\udce9 2.png \(cannot identify") as refusal:
        open_dataset("", tmp_path / "pics", image_size=4)
    refusal.value.args[0].encode()
    dataset = open_dataset("", tmp_path / "pics", image_size=4, skip_broken_images=True)
    assert dataset.class_names == ["caf\\udce9", "tea"]
    assert dataset.labels.tolist() == [0, 1]
    assert dataset.info.skipped == [f"{tmp_path}/pics/tea/caf\\udce9 2.png"]


def test_a_folder_behind_a_link_may_have_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    save_picture(tmp_path / LATIN / "1.png")
    (tmp_path / "cafe").symlink_to(tmp_path / LATIN)
    assert open_dataset("", tmp_path / "cafe", image_size=4).description == "caf\\udce9: 1 images of 4 px"
    with pytest.raises(UsageError, match=r"^`dataset_path` .*/caf\\udce9 cannot be used \(its name is not UTF-8\)"):
        open_dataset("", tmp_path / LATIN, image_size=4)


@pytest.mark.parametrize(
    ("cache", "base", "folder"),
    [("", "", "home/.cache/rectified-flow"), ("", "base", "base/rectified-flow"), ("own", "base", "own")],
)
def test_an_empty_variable_names_no_folder(
    cache: str, base: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in {"RECTIFIED_FLOW_CACHE": cache, "XDG_CACHE_HOME": base}.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    assert default_cache_dir() == tmp_path / folder


def test_the_name_of_a_store_is_as_long_as_file_systems_allow(tmp_path: Path) -> None:
    source = SyntheticFlowers(8, count=2)
    source.name = "\N{CJK UNIFIED IDEOGRAPH-20000}" * 300  # four bytes each
    assert open_store(source, 4, cache_dir=tmp_path).exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    save_picture(tmp_path / "pics/1.png")
    odd = tmp_path / "pics/2.png"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to("/dev/zero" if kind == "device" else odd)
    with pytest.raises(UsageError, match=r"broken image .*/2\.png \(.+\): remove it, or pass `skip_broken"):
        open_dataset("", tmp_path / "pics", image_size=4)
    assert len(open_dataset("", tmp_path / "pics", image_size=4, skip_broken_images=True)) == 1


def test_a_picture_that_may_not_be_read_is_named_or_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1.png", "2.png"):
        save_picture(tmp_path / "pics" / name)
    with refusing(monkeypatch, "2.png"):
        with pytest.raises(UsageError, match=r"2\.png \(Permission denied\): remove it, or pass `skip_broken"):
            open_dataset("", tmp_path / "pics", image_size=4)
        assert len(open_dataset("", tmp_path / "pics", image_size=4, skip_broken_images=True)) == 1


def test_a_store_that_is_gone_when_its_pixels_are_read(tmp_path: Path) -> None:
    path = open_store(SyntheticFlowers(8, count=2), 4, cache_dir=tmp_path)
    for name in ("labels.npy", "images.uint8"):
        dataset = ImageDataset(path)
        (path / name).unlink()
        with pytest.raises(DamageError, match=f"{name} is missing"):
            dataset.read_batch([0])


@pytest.mark.parametrize(
    ("feature", "labels", "sentence"),
    [
        (NUMBER, [3, 0, -5], r"broken image row 2 of set train \(its label is -5, outside the 4 classes numbered"),
        (PETS, [1, 7, 0], r"broken image row 1 of set train \(its label is 7, outside the 2 classes numbered from 0\)"),
    ],
)
def test_labels_that_cannot_be_classes(tmp_path: Path, feature: Any, labels: list[int], sentence: str) -> None:
    folder = save_table(tmp_path / "set", feature, labels)
    with pytest.raises(UsageError, match=sentence):
        open_dataset("", folder, image_size=4)
    dataset = open_dataset("", folder, image_size=4, skip_broken_images=True)
    assert 0 <= dataset.labels.min() <= dataset.labels.max() < len(dataset.class_names)
    assert len(dataset.info.skipped) == 1


def test_a_row_may_name_a_file_of_the_datasets_folder(tmp_path: Path) -> None:
    paths = ["within.png", str(tmp_path / "set/within.png"), "pipe.png", ""]
    folder = save_table(tmp_path / "set", NUMBER, [0] * len(paths), paths)
    save_picture(folder / "within.png")
    os.mkfifo(folder / "pipe.png")
    dataset = open_dataset("", folder, image_size=4, skip_broken_images=True)
    assert dataset.info.skipped == ["row 2 of set train", "row 3 of set train"]


def test_a_row_of_a_hub_dataset_names_a_file_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source, file = HuggingFaceSource("some/pictures"), str(tmp_path / "cache/downloads/1.png")
    assert source._find_file(file) == Path(file)
    with pytest.raises(ValueError, match="a file outside the dataset's folder"):
        source._find_file(str(tmp_path / "1.png"))


def test_a_table_of_something_else_than_pictures(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"], "size": [1]}).to_parquet(tmp_path / "words.parquet")
    with pytest.raises(UsageError, match=r"^the folder .* has no image column, only text, size: to train on image"):
        open_dataset("", tmp_path, image_size=4)


def test_pictures_of_other_kinds_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for name in ("1.png", "a/6.png"):
        save_picture(folder / name)
    for name in ("2.PSD", "3.psd", "4.cr2", "5.txt"):
        (folder / name).write_bytes(b"not read")
    said = "\n".join(FileFolder(folder).notes)
    assert "left out 3 files of other formats (pip install pillow-heif " in said
    assert "to read heic and jxl), such as 2.PSD" in said
    assert "no classes: 1 pictures are in no subfolder, such as 1.png" in said
    (folder / "1.png").unlink()
    assert FileFolder(folder).class_names == ["a"]
    (folder / "a/6.png").unlink()
    with pytest.raises(UsageError, match=r"holds no pictures .*; left out 3 files"):
        FileFolder(folder)
