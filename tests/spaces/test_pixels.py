"""Pixels: between stored pictures, what a flow works on, and pictures to look at."""

import pytest
import torch

from rectified_flow.registry import build, describe
from rectified_flow.spaces.pixels import Pixels


def every_value() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)


def test_every_value_survives_the_way_there_and_back() -> None:
    space, images = Pixels(), every_value()
    x = space.encode(images)
    assert x.dtype == torch.float32
    assert (x.min().item(), x.max().item()) == (-1, 1)
    assert torch.equal(space.draw(space.decode(x)), images.expand(-1, 3, -1, -1))


def test_floating_point_pictures_are_taken_as_they_are() -> None:
    images = torch.rand(2, 3, 4, 4, dtype=torch.float64) * 2 - 1
    assert torch.equal(Pixels().encode(images), images.float())


def test_values_outside_are_clipped() -> None:
    decoded = Pixels().decode(torch.tensor([-1.5, -1.0, 0.0, 1.0, 7.0]))
    assert decoded.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_a_single_channel_is_drawn_grey() -> None:
    picture = Pixels().draw(torch.tensor([0.0, 0.2, 1.0]).reshape(1, 1, 1, 3))
    assert picture.dtype == torch.uint8
    assert picture.tolist() == [[[[0, 51, 255]]] * 3]


def test_channels_after_the_third_are_not_drawn() -> None:
    data = torch.rand(2, 5, 5, 5)
    picture = Pixels().draw(data)
    assert picture.shape == (2, 3, 5, 5)
    assert torch.equal(picture, data[:, :3].mul(255).round().to(torch.uint8))


def test_half_of_the_images_are_mirrored() -> None:
    torch.manual_seed(0)
    x = torch.arange(4.0).expand(1000, 1, 2, 4)
    flipped = Pixels(horizontal_flip=True).augment(x)
    mirrored = (flipped == x.flip(-1)).flatten(1).all(dim=1)
    kept = (flipped == x).flatten(1).all(dim=1)
    assert torch.equal(mirrored, ~kept)
    assert 430 < mirrored.sum() < 570
    assert torch.equal(Pixels().augment(x), x)


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


def test_uint8_never_looks_wrong() -> None:
    assert Pixels().problem_with(every_value()) is None


def test_the_noun_and_the_description() -> None:
    assert Pixels((3, 32, 48)).noun == "48x32 px"
    assert Pixels((4, 8, 8)).noun == "8 px with transparency"
    assert Pixels().noun == "images"
    back = build(describe(Pixels([3, 8, 8], horizontal_flip=True)))
    assert (back.shape, back.horizontal_flip) == ((3, 8, 8), True)
