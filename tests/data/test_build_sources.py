"""Tests of sources of pictures: folders, datasets of the hub, and drawn flowers."""

import os
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image

from rectified_flow.data.open import OxfordFlowersDataset, open_dataset
from rectified_flow.data.sources.folder import PictureFolder
from rectified_flow.data.sources.synthetic_flowers import SPECIES, SyntheticFlowers
from rectified_flow.errors import UsageError


def save_picture(path: Path, red: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF"}.get(path.suffix.lower())
    Image.new("RGB", (10, 8), (red, 100, 200)).save(path, kind)


def hub_layout(folder: Path, names: list[str], labels: list[int]) -> Path:
    """Parquet files as the hub keeps them, one 10 px picture per label."""
    pictures = [Image.new("RGB", (10, 10), (10 * label, 0, 0)) for label in labels]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
    (folder / "data").mkdir(parents=True)
    rows.to_parquet(folder / "data/train-00000-of-00001.parquet")
    return folder


def test_the_hubs_layout(tmp_path: Path) -> None:
    folder = hub_layout(tmp_path / "set", ["cat", "dog"], [1, 0, 1])
    dataset = open_dataset("", folder, image_size=4)
    assert dataset.class_names == ["cat", "dog"]
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.images[:, 0, 0, 0].tolist() == [10, 0, 10]
    with pytest.raises(UsageError, match="has no split 'test': pass one of train"):
        open_dataset("", folder, image_size=4, split="test")


def test_rows_without_a_label_mean_no_classes(tmp_path: Path) -> None:
    """A hub's test split often has -1, or nothing, for a label."""
    for name, labels in (("hidden", [0, -1, 1]), ("missing", [0, None, 1])):
        rows = datasets.Dataset.from_dict({"image": [Image.new("RGB", (10, 10))] * 3, "label": labels})
        rows = rows.cast_column("image", datasets.Image())
        rows.cast_column("label", datasets.ClassLabel(names=["cat", "dog"])).save_to_disk(str(tmp_path / name))
        dataset = open_dataset("", tmp_path / name, image_size=4)
        assert len(dataset) == 3
        assert dataset.conditions == {}


def test_oxford_flowers_have_their_true_names(tmp_path: Path) -> None:
    """The hub's class names are Oxford ids in text order: label 1 is id 10."""
    names = sorted(str(number) for number in range(1, 103))
    folder = hub_layout(tmp_path / "flowers", names, [0, 1, names.index("54")])
    dataset = OxfordFlowersDataset(4, source=folder)
    assert len(set(dataset.class_names)) == 102
    shown = [dataset.class_names[label] for label in dataset.labels]
    assert shown == ["pink primrose", "globe thistle", "sunflower"]
    assert open_dataset("", folder, image_size=4).class_names == dataset.class_names


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
    folder = PictureFolder(tmp_path / "pics")
    assert [str(file.relative_to(tmp_path / "pics")) for file in folder.files] == [
        "bird/4.png",
        "cat/1.png",
        "cat/2.png",
        "dog/3.png",
    ]
    assert folder.class_names == ["bird", "cat", "dog"]


def test_a_folder_that_cannot_be_read_is_named_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        save_picture(tmp_path / "pics" / name)
    scandir = os.scandir

    def scan(path: Any) -> Any:  # the rights of a folder do not bind root
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(UsageError, match=r"the folder .*/pics/dog cannot be read \(Permission denied\)"):
        open_dataset("", tmp_path / "pics", image_size=8, cache_dir=tmp_path / "cache")
    dataset = open_dataset("", tmp_path / "pics", image_size=8, cache_dir=tmp_path / "cache", skip_broken_images=True)
    assert len(dataset) == 1
    assert "skipped 1 unreadable folders" in capsys.readouterr().out


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
    with pytest.raises(UsageError, match="could not be loaded from the hub: there is no network"):
        open_dataset("some/pictures", image_size=4)
    assert said[0] == f"reading some/pictures from {huggingface_hub.constants.ENDPOINT}\n"
