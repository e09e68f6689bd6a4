"""Tests of the space of pixels: encoding, rendering, mirroring and crops; and of degradations."""

import re

import pytest
import torch
from torch import Tensor

from rectified_flow.cli.data import choose_degradation
from rectified_flow.errors import UsageError
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.degradations import Blur, Degradation, Downsample, Edges, Grey, Mask
from rectified_flow.spaces.pixels import Pixels


def every_value() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)


def test_every_value_survives_the_way_there_and_back() -> None:
    space, images = Pixels(), every_value()
    x = space.encode(images)
    assert x.dtype == torch.float32
    assert (x.min().item(), x.max().item()) == (-1, 1)
    assert torch.equal(space.medium.render(space.decode(x)), images.expand(-1, 3, -1, -1))


def test_a_single_channel_is_drawn_grey() -> None:
    picture = Pixels().medium.render(torch.tensor([0.0, 0.2, 1.0]).reshape(1, 1, 1, 3))
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


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 4), (2, 4, 2, 3, 8)])
def test_data_that_are_not_pictures_are_refused(shape: tuple[int, ...]) -> None:
    sentence = f"and the data have the shape {list(shape)}: pass items [c, h, w], or a `space` of"
    with pytest.raises(UsageError, match=re.escape(sentence)):
        Pixels(horizontal_flip=True).augment(torch.zeros(shape))


@pytest.mark.parametrize(
    ("least", "most", "sentence"),
    [
        (-1.0, 1.0, None),
        (-0.25, 0.5, None),
        (-1.002, 1.01, None),
        (-1.02, 1.0, "reach from -1.02 to 1; scale"),
        (-0.5, 1.02, "reach from -0.5 to 1.02; scale"),
        (0.0, 1.0, "reach from 0 to 1; scale floating-point images to [-1, 1], or store uint8"),
        (0.0, 255.0, "reach from 0 to 255; scale floating-point images to [-1, 1], or store uint8"),
        (-2.5, 0.0, "reach from -2.5 to 0"),
        (-1.0, float("nan"), "reach from nan to nan"),
    ],
)
def test_what_looks_wrong_is_told(least: float, most: float, sentence: str | None) -> None:
    problem = Pixels().medium.problem_with({"images": torch.tensor([least, most]).reshape(2, 1, 1, 1)})
    assert problem is None if sentence is None else sentence in (problem or "")


@pytest.mark.parametrize(("sides", "is_small"), [((8, 8), True), ((16, 8), True), ((16, 16), False), ((20, 16), False)])
def test_pictures_smaller_than_samples_are_reported(sides: tuple[int, int], is_small: bool) -> None:
    """A flow would be trained at one size and sampled at another. Larger pictures are cropped."""
    problem = Pixels((3, 16, 16)).medium.problem_with({"images": torch.zeros(2, 3, *sides, dtype=torch.uint8)})
    assert (problem or "").startswith("images of") == is_small


def test_transparency_is_shown_over_white_and_kept_in_files() -> None:
    space = Pixels((4, 1, 3))
    stored = torch.tensor([[10, 10, 10], [20, 20, 20], [30, 30, 30], [255, 0, 51]], dtype=torch.uint8)[None, :, None]
    data = space.decode(space.encode(stored))
    assert space.medium.render(data)[0, :, 0].T.tolist() == [[10, 20, 30], [255, 255, 255], [206, 208, 210]]
    assert torch.equal(space.medium.contents(data), stored)
    assert torch.equal(space.to_stored(space.encode(stored)), stored)
    assert Pixels((3, 1, 3)).medium.contents(data[:, :3]).shape == (1, 3, 1, 3)
    assert (space.medium.picture_shape, Pixels((1, 8, 8)).medium.picture_shape) == ((4, 1, 3), (1, 8, 8))


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


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_downsampling_leaves_the_means_of_blocks(pictures: Tensor) -> None:
    small = Downsample(4)(pictures)
    assert torch.allclose(small[1, 2, 4:8, 12:16], pictures[1, 2, 4:8, 12:16].mean().expand(4, 4))
    cut = Downsample(5)(pictures)
    assert torch.allclose(cut[1, 2, 15:, 10:15], pictures[1, 2, 15:, 10:15].mean().expand(1, 5)), "a block at the edge"


def test_a_block_with_an_unknown_pixel_is_the_mean_of_the_others() -> None:
    x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])[None, None]
    torch.testing.assert_close(Downsample(2)(x), torch.full((1, 1, 2, 2), 2.0))
    assert Downsample(2)(torch.full((1, 1, 2, 2), torch.nan)).isnan().all()


def test_grey_leaves_the_brightness_and_the_transparency(pictures: Tensor) -> None:
    grey = Grey()(torch.cat((pictures, pictures[:, :1]), dim=1))
    assert torch.equal(grey[:, 3], pictures[:, 0])
    assert torch.allclose(grey[:, 0], 0.299 * pictures[:, 0] + 0.587 * pictures[:, 1] + 0.114 * pictures[:, 2])
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_blurring_a_point_gives_a_gaussian() -> None:
    point = torch.zeros(1, 1, 31, 31)
    point[0, 0, 15, 15] = 1
    blurred = Blur(2.0)(point)[0, 0]
    places = torch.arange(31.0) - 15
    assert blurred.sum().item() == pytest.approx(1)
    assert (blurred.sum(dim=0) * places**2).sum().sqrt().item() == pytest.approx(2.0, rel=0.02)
    flat = torch.full((1, 3, 8, 8), 0.3)
    assert torch.allclose(Blur(3.0)(flat), flat), "nothing comes in from outside"


def test_edges_are_dark_where_the_brightness_changes() -> None:
    halves = torch.full((1, 3, 8, 8), -1.0)
    halves[..., 4:] = 1
    lines = Edges()(halves)
    assert torch.equal(lines[0, 0, :, 3], lines[0, 0, :, 4])
    assert lines[0, 0, 0, 3].item() == -1, "the strongest edge is black"
    assert (lines[..., [0, 1, 6, 7]] == 1).all(), "no line where nothing changes"


@pytest.mark.parametrize("shape", ["box", "brush"])
def test_a_hole_is_a_function_of_the_step_and_of_the_row(shape: str, pictures: Tensor) -> None:
    mask = choose_degradation(f"mask:{shape}")
    assert isinstance(mask, Mask)

    def draw(step: int, rows: slice) -> Tensor:
        with deterministic(BatchRows(3, step, 4, rows)):
            return mask(pictures[rows])

    whole = draw(5, slice(None))
    holes = whole.isnan()
    assert torch.equal(holes.any(dim=1), holes.all(dim=1)), "all channels of a pixel"
    assert torch.equal(whole[~holes], pictures[~holes]), "the rest is unchanged"
    shares = holes[:, 0].float().mean(dim=(1, 2))
    assert ((shares > 0.03) & (shares < 0.6)).all()
    assert torch.equal(draw(5, slice(1, None, 2)).isnan(), holes[1::2]), "the same on two processes"
    assert not torch.equal(draw(6, slice(None)).isnan(), holes)
    assert not torch.equal(holes[0], holes[1])


@pytest.mark.parametrize(
    "degradation", [Downsample(4), Downsample(5), Grey(), Blur(), Mask(), Edges()], ids=lambda d: type(d).__name__
)
def test_a_projection_changes_nothing_the_second_time(degradation: Degradation, pictures: Tensor) -> None:
    once = degradation(pictures)
    assert once.shape == pictures.shape
    assert torch.allclose(once, degradation(once), equal_nan=True, atol=1e-5) == degradation.is_projection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nonsense", "nonsense is not registered: choose Blur or Downsample or Edges or Grey or Mask"),
        ("downsample:1", "`degrade` factor is 1; it must be greater than or equal to 2"),
        ("downsample:x", "`degrade` factor is x"),
        ("grey:3", "`degrade` grey=3: Grey takes KEY=VALUE with the keys none"),
        ("mask:star", "`degrade` shape is star"),
    ],
)
def test_bad_names_and_values_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        choose_degradation(text)
