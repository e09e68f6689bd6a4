"""Tests of datasets in tables: which columns and which split are read, and what integers mean as labels."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from rectified_flow.data.open import open_dataset
from rectified_flow.data.sources.huggingface import HuggingFaceSource
from rectified_flow.errors import UsageError


def encoded(value: int) -> dict[str, Any]:
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def save(folder: Path, columns: Mapping[str, tuple[Any, Sequence[Any]]], split: str = "train") -> Path:
    """A folder with a table; a column of images has a number for each, the red of its pixels."""
    kinds = datasets.Features({name: feature for name, (feature, _) in columns.items()})
    is_image = {name: isinstance(feature, datasets.Image) for name, feature in kinds.items()}
    cells = {name: [*map(encoded, of)] if is_image[name] else list(of) for name, (_, of) in columns.items()}
    folder.mkdir()
    datasets.Dataset.from_dict(cells, features=kinds).to_parquet(folder / f"{split}.parquet")
    return folder


IMAGE, NUMBER = datasets.Image(), datasets.Value("int64")


def names(*classes: str) -> datasets.ClassLabel:
    return datasets.ClassLabel(names=list(classes))


def test_columns_with_conventional_names_are_read_and_others_can_be_chosen(tmp_path: Path) -> None:
    columns = {"conditioning_image": (IMAGE, [1, 2]), "image": (IMAGE, [10, 20])}
    columns |= {"scene": (names("day", "night"), [0, 0]), "label": (names("cat", "dog"), [1, 0])}
    folder = save(tmp_path / "set", columns)
    source = HuggingFaceSource(folder)
    assert [source.load(0)[0].getpixel((0, 0)), source.load(0)[1]] == [(10, 0, 0), 1]
    assert source.class_names == ["cat", "dog"]
    assert source.notes == [
        "read the image column image, not conditioning_image: pass `image_column` to choose another",
        "read the label column label, not scene: pass `label_column` to choose another",
    ]
    chosen = open_dataset("", folder, image_size=8, image_column="conditioning_image", label_column="scene")
    assert chosen.entries["images"][:, 0, 0, 0].tolist() == [1, 2]
    assert chosen.class_names == ["day", "night"]
    assert open_dataset("", folder, image_size=8).entries["images"][:, 0, 0, 0].tolist() == [10, 20]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"image_column": "x"}, "`image_column` x is not among the image columns of set train: image"),
        ({"label_column": "text"}, "`label_column` text is not among .*: there are none; `condition_on` trains on a"),
    ],
)
def test_columns_that_do_not_suit_are_named(tmp_path: Path, flags: dict[str, str], sentence: str) -> None:
    folder = save(tmp_path / "set", {"image": (IMAGE, [1]), "text": (datasets.Value("string"), ["a"])})
    with pytest.raises(UsageError, match=sentence):
        open_dataset("", folder, image_size=8, **flags)  # type: ignore[arg-type]


def test_columns_are_for_tables(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    with pytest.raises(UsageError, match=r"^`label_column` x is for tables, and .* is a folder of files: leave it out"):
        open_dataset("", tmp_path, image_size=8, label_column="x")


LABELS: dict[str, tuple[list[Any], list[str]]] = {
    "years": ([1990, 1991, 1995, 2001] * 5, ["1990", "1991", "1995", "2001"]),
    "large ids": ([30_000_000, 30_000_007] * 3, ["30000000", "30000007"]),
    "a class without a picture": ([0, 1, 3] * 3, ["0", "1", "2", "3"]),
    "rows without a label": ([0, None, 1, -1], []),
    "ids of rows": ([*range(30_000_000, 30_000_020)], []),
}


@pytest.mark.parametrize("kind", LABELS)
def test_integers_are_classes_by_their_values(tmp_path: Path, kind: str) -> None:
    labels, classes = LABELS[kind]
    folder = save(tmp_path / "set", {"image": (IMAGE, range(len(labels))), "label": (NUMBER, labels)})
    dataset, source = open_dataset("", folder, image_size=8), HuggingFaceSource(folder)
    assert dataset.class_names == classes
    if classes:
        assert [classes[label] for label in dataset.labels] == [*map(str, labels)]
    assert source.class_names == (classes or (["0", "1"] if None in labels else []))
    noted = ["no classes: the column label has 20 different numbers"] if kind == "ids of rows" else []
    assert source.notes == noted


def test_102_classes_are_flowers_only_in_a_dataset_of_flowers(tmp_path: Path) -> None:
    classes = sorted(str(number) for number in range(1, 103))
    columns = {"image": (IMAGE, [1]), "label": (names(*classes), [0])}
    assert HuggingFaceSource(save(tmp_path / "birds", columns)).class_names == classes
    assert HuggingFaceSource(save(tmp_path / "flowers", columns)).class_names[0] == "pink primrose"


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_only_split_is_read(tmp_path: Path, is_saved: bool) -> None:
    folder = save(tmp_path / "set", {"image": (IMAGE, [1, 2])}, "validation")
    if is_saved:
        datasets.load_dataset(str(folder)).save_to_disk(str(tmp_path / "saved"))
        folder = tmp_path / "saved"
    source = HuggingFaceSource(folder)
    assert len(source) == 2
    assert source.notes == ["read the split validation, as there is no other"]
    with pytest.raises(UsageError, match='Unknown split "test"'):
        len(HuggingFaceSource(folder, "test"))
