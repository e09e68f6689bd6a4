"""Tests of the report on a folder of pictures, and of the facts in its store."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.cli.train import summarize_pictures
from rectified_flow.data.build import open_store
from rectified_flow.data.config import Framing
from rectified_flow.data.open import open_dataset
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """11 cats, one of them small, and 2 dogs, one of which is a cat; and a broken file."""
    for number in range(13):
        path = tmp_path / "pets" / ("cats" if number < 11 else "dogs") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (6, 40) if number == 3 else (20 + number, 30)
        Image.new("RGB", size, (0 if number == 12 else 9 * number, 0, 0)).save(path)
    (tmp_path / "pets/dogs/99.png").write_bytes(b"nothing")
    return tmp_path / "pets"


def test_counts_and_rare_classes(pictures: Path) -> None:
    dataset = open_dataset("", pictures, image_size=8, skip_broken_images=True)
    assert dataset.description == "pets: 13 images of 8 px, 2 classes"
    assert summarize_pictures(dataset) == (
        "13; 6 to 32 px wide, 30 to 40 px high; 1 smaller than 8 px, so enlarged and blurred; 1 equal to an earlier "
        "picture; 1 of 2 classes with fewer than 10 pictures: dogs (2)"
        f"; 1 left out; the first is {pictures}/dogs/99.png"
    )


def test_the_framing_names_a_store_where_it_is_not_the_default(tmp_path: Path) -> None:
    framings = [
        *(Framing(4, 4), Framing(8, 4), Framing(4, 8), Framing(4, 4, alpha=True)),
        *(Framing(4, 4, crop="random"), Framing(4, 4, crop="none")),
    ]
    paths = [open_store(SyntheticFlowers(8, count=2), framing, cache_dir=tmp_path) for framing in framings]
    assert len(set(paths)) == len(framings)
    for path, framing in zip(paths, framings, strict=True):
        dataset = ImageDataset(path)
        assert dataset.entries["images"].shape == (2, framing.shape[0], *framing.stored_size[::-1])
        assert dataset.read_pictures([0, 1]).shape == (2, 3, *framing.shape[1:])
        assert dataset.info.framing == framing


def test_pictures_are_compared_by_their_centre_over_white(tmp_path: Path) -> None:
    pixels = np.full((10, 10, 4), 255, np.uint8)
    pixels[1:9, 1:9] = (0, 0, 0, 255)
    pixels[4:6, 4:6] = 0
    (tmp_path / "pictures").mkdir()
    Image.fromarray(pixels).save(tmp_path / "pictures/a.png")
    dataset = open_dataset("", tmp_path / "pictures", image_size=8, crop="random", alpha=True)
    [shown] = dataset.read_pictures([0])
    assert (shown[:, 3:5, 3:5] == 255).all()
    assert (shown.sum(), shown.max()) == (3 * 4 * 255, 255)
