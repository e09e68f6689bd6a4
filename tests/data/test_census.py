"""Tests of the faults of pictures that are counted while pictures are stored."""

import io
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rectified_flow.data.census import Census

Pixels = NDArray[np.uint8]
RANDOM = np.random.default_rng(0)


def photograph(side: int = 32) -> Pixels:
    """Smooth colours, uint8 ``[3, side, side]``."""
    small = Image.fromarray(RANDOM.integers(256, size=(4, 4, 3), dtype=np.uint8))
    return np.asarray(small.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def recompressed(picture: Pixels) -> Pixels:
    content = io.BytesIO()
    Image.fromarray(picture.transpose(1, 2, 0)).save(content, "JPEG", quality=80)
    return np.asarray(Image.open(content)).transpose(2, 0, 1)


def grey(picture: Pixels) -> Pixels:
    return np.repeat(picture[:1], 3, axis=0)


def with_alpha(picture: Pixels, alpha: int) -> Pixels:
    return np.concatenate((picture, np.full_like(picture[:1], alpha)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grey, "1 picture is grey, such as 2.png"),
        (lambda picture: recompressed(grey(picture)), "1 picture is grey, such as 2.png"),
        (lambda picture: picture // 17, "1 picture is dark, with no value above 15 of 255, such as 2.png"),
        (np.zeros_like, "1 picture is of one colour, such as 2.png"),
        (lambda picture: with_alpha(picture, 0), "1 picture is wholly transparent, such as 2.png"),
        (lambda picture: with_alpha(picture, 1), None),
        (lambda picture: picture, None),
    ],
)
def test_a_faulty_picture_is_named(change: Callable[[Pixels], Pixels], words: str | None) -> None:
    census = Census()
    for picture in (photograph(), photograph(), change(photograph()), photograph()):
        census.add(picture)
    assert census.notes([f"{number}.png" for number in range(4)]) == [words][: words is not None]


def test_recompressed_copies_are_nearly_equal_and_equal_pictures_are_not() -> None:
    census, pictures = Census(), [photograph(64) for _ in range(20)]
    for picture in (*pictures, *map(recompressed, pictures), *pictures):
        census.add(picture)
    [note] = census.notes([str(number) for number in range(60)])
    count, _, rest = note.partition(" ")
    assert 18 <= int(count) <= 20
    assert rest.startswith("pictures are nearly equal to an earlier one, such as 2")


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 4, 9), (4, 8, 8), (3, 9, 4)])
def test_small_pictures_are_compared_too(shape: tuple[int, ...]) -> None:
    census, picture = Census(), RANDOM.integers(100, 200, size=shape, dtype=np.uint8)
    for each in (picture, picture, picture + 1):
        census.add(each)
    [*_, note] = census.notes(["0", "1", "2"])
    assert note.startswith("1 picture is nearly equal") or shape == (3, 1, 1)


def test_the_cost_does_not_grow_with_the_number_of_pictures_that_are_alike() -> None:
    """Drawings on white have most of their hash in common."""
    census = Census()
    drawings = np.full((2000, 3, 8, 8), 255, np.uint8)
    drawings[:, :, 4, 4] = RANDOM.integers(256, size=(2000, 3))
    started = time.perf_counter()
    for drawing in drawings:
        census.add(drawing)
    assert time.perf_counter() - started < 5
    assert all(len(numbers) <= 8 for numbers in census._by_part.values())
