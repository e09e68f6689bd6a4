"""Tests of degradations, and of random holes as functions of the step."""

import pytest
import torch
from torch import Tensor

from rectified_flow.cli.data import choose_degradation
from rectified_flow.errors import UsageError
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.degradations import Blur, Degradation, Downsample, Edges, Grey, Mask


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_downsampling_leaves_the_means_of_blocks(pictures: Tensor) -> None:
    small = Downsample(4)(pictures)
    assert torch.allclose(small[1, 2, 4:8, 12:16], pictures[1, 2, 4:8, 12:16].mean().expand(4, 4))
    with pytest.raises(ValueError, match="20 and 16 are not divisible by 8"):
        Downsample(8).check_sides(16, 20)


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
    "degradation", [Downsample(4), Grey(), Blur(), Mask(), Edges()], ids=lambda d: type(d).__name__
)
def test_a_projection_changes_nothing_the_second_time(degradation: Degradation, pictures: Tensor) -> None:
    once = degradation(pictures)
    assert once.shape == pictures.shape
    assert torch.allclose(once, degradation(once), equal_nan=True, atol=1e-5) == degradation.is_projection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nonsense", "nonsense is not registered: choose Blur or Downsample or Edges or Grey or Mask"),
        ("downsample:1", "--degrade factor is 1; it must be greater than or equal to 2"),
        ("downsample:x", "--degrade factor is x"),
        ("grey:3", "--degrade grey=3: Grey takes KEY=VALUE with the keys none"),
        ("mask:star", "--degrade shape is star"),
    ],
)
def test_bad_names_and_values_are_refused(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        choose_degradation(text)
