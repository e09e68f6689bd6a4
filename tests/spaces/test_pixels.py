"""Tests of the space of pixels: encoding, rendering, mirroring and crops."""

import pytest
import torch

from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.pixels import Pixels


def every_value() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)


def test_every_value_survives_the_way_there_and_back() -> None:
    space, images = Pixels(), every_value()
    x = space.encode(images)
    assert x.dtype == torch.float32
    assert (x.min().item(), x.max().item()) == (-1, 1)
    assert torch.equal(space.render(space.decode(x)), images.expand(-1, 3, -1, -1))


def test_a_single_channel_is_drawn_grey() -> None:
    picture = Pixels().render(torch.tensor([0.0, 0.2, 1.0]).reshape(1, 1, 1, 3))
    assert picture.dtype == torch.uint8
    assert picture.tolist() == [[[[0, 51, 255]]] * 3]


def test_half_of_the_images_are_mirrored() -> None:
    torch.manual_seed(0)
    x = torch.arange(4.0).expand(1000, 1, 2, 4)
    flipped = Pixels(horizontal_flip=True).augment(x)[0]
    mirrored = (flipped == x.flip(-1)).flatten(1).all(dim=1)
    kept = (flipped == x).flatten(1).all(dim=1)
    assert torch.equal(mirrored, ~kept)
    assert 430 < mirrored.sum() < 570
    assert torch.equal(Pixels().augment(x)[0], x)


@pytest.mark.parametrize(
    ("least", "most", "sentence"),
    [
        (-1.0, 1.0, None),
        (-0.25, 0.5, None),
        (0.0, 1.0, r"lie in [0, 1]; scale them to [-1, 1] (2 * x - 1), or store uint8"),
        (0.0, 255.0, "reach from 0 to 255; scale floating-point images to [-1, 1], or store uint8"),
        (-2.5, 0.0, "reach from -2.5 to 0"),
        (-1.0, float("nan"), "reach from nan to nan"),
    ],
)
def test_what_looks_wrong_is_told(least: float, most: float, sentence: str | None) -> None:
    problem = Pixels().problem_with(torch.tensor([least, most]).reshape(2, 1, 1, 1))
    assert problem is None if sentence is None else sentence in (problem or "")


def test_transparency_is_shown_over_white_and_kept_in_files() -> None:
    space = Pixels((4, 1, 3))
    stored = torch.tensor([[10, 10, 10], [20, 20, 20], [30, 30, 30], [255, 0, 51]], dtype=torch.uint8)[None, :, None]
    data = space.decode(space.encode(stored))
    assert space.render(data)[0, :, 0].T.tolist() == [[10, 20, 30], [255, 255, 255], [206, 208, 210]]
    assert torch.equal(space.render_with_alpha(data), stored)
    assert torch.equal(space.to_stored(space.encode(stored)), stored)
    assert Pixels((3, 1, 3)).render_with_alpha(data[:, :3]).shape == (1, 3, 1, 3)
    assert (space.picture_shape, Pixels((1, 8, 8)).picture_shape) == ((4, 1, 3), None)


def coordinates(count: int) -> torch.Tensor:
    """Stored pictures of 10 x 15 px whose channels are the row, the column and the number of the picture."""
    y, x = torch.meshgrid(torch.arange(10), torch.arange(15), indexing="ij")
    rows = torch.arange(count).reshape(-1, 1, 1)
    return torch.stack([each.expand(count, 10, 15) for each in (y, x, rows)], dim=1).to(torch.uint8)


def cropped(step: int, rows: slice) -> torch.Tensor:
    with deterministic(BatchRows(seed=1, step=step, total=64, index=rows)):
        return Pixels((3, 8, 12)).augment(coordinates(64)[rows])[0]


def test_a_random_part_is_a_whole_window_anywhere() -> None:
    parts = cropped(0, slice(0, 64))
    assert parts.shape == (64, 3, 8, 12)
    for number, part in enumerate(parts):
        top, left = int(part[0, 0, 0]), int(part[1, 0, 0])
        assert torch.equal(part, coordinates(64)[number, :, top : top + 8, left : left + 12])
    corners = {(int(part[0, 0, 0]), int(part[1, 0, 0])) for part in parts}
    assert corners == {(top, left) for top in range(3) for left in range(4)}
