"""Tests of augmentation: the changes, their numbers, and samples without them."""

import math

import pytest
import torch
from torch import Tensor

from rectified_flow.condition import AugmentationLabels
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.augmentation import NUMBERS, _moved, _recoloured, augmented
from rectified_flow.spaces.pixels import Pixels

X = torch.rand(4, 3, 6, 8, generator=torch.Generator().manual_seed(0)) * 1.8 - 0.9
SQUARE = X[..., :6]


def matrix(a: float, b: float, c: float, d: float) -> Tensor:
    return torch.tensor([[a, b], [c, d]]).float().expand(4, 2, 2)


def shift(x: float, y: float) -> Tensor:
    return torch.tensor([x, y]).float().expand(4, 2)


@pytest.mark.parametrize(
    ("linear", "moved", "x", "expected"),
    [
        (matrix(-1, 0, 0, 1), shift(0, 0), X, X.flip(-1)),
        (matrix(1, 0, 0, -1), shift(0, 0), X, X.flip(-2)),
        (matrix(0, -1, 1, 0), shift(0, 0), SQUARE, SQUARE.rot90(-1, (-2, -1))),  # x to the right, y downwards
        (matrix(1, 0, 0, 1), shift(2, 0), X, torch.cat((X[..., [1, 0]], X[..., :-2]), dim=-1)),
        (matrix(1, 0, 0, 1), shift(0, -1), X, torch.cat((X[..., 1:, :], X[..., -1:, :]), dim=-2)),
    ],
)
def test_exact_moves(linear: Tensor, moved: Tensor, x: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(_moved(x, linear, moved), expected, atol=1e-5, rtol=0)


def test_scaling_moves_a_point_away_from_the_centre() -> None:
    x = torch.full((4, 1, 9, 9), -1.0)
    x[:, :, 4, 5] = 1  # one to the right of the centre
    row, column = divmod(int(_moved(x, matrix(2, 0, 0, 2), shift(0, 0))[0, 0].argmax()), 9)
    assert (row, column) == (4, 6)


def test_unknown_pixels_do_not_spread() -> None:
    """Mirroring and whole shifts keep every value, and other moves the share of unknown pixels and a flat field."""
    some = torch.rand(64, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    unknown = some < 0.05
    with deterministic(BatchRows(0, 0, 64, slice(None))):
        moved, numbers = augmented(some.masked_fill(unknown, torch.nan), 0.5, colours=False, has_missing=True)
        flat = augmented(0 * some.masked_fill(unknown, torch.nan) + 0.3, 0.9, colours=False, has_missing=True)[0]
    whole = (numbers[:, 4:] == 0).all(dim=1)
    assert 0 < whole.sum() < 64
    known, values = ~moved.isnan(), some[~unknown]
    assert torch.isin(moved[whole][known[whole]], values).all()
    assert 1 - known[~whole].float().mean() == pytest.approx(0.05, abs=0.02)
    torch.testing.assert_close(flat[~flat.isnan()], torch.full_like(flat[~flat.isnan()], 0.3))


def test_mirroring_moves_unknown_pixels_along() -> None:
    x = X.masked_fill(X > 0.6, torch.nan)
    moved = _moved(x, matrix(-1, 0, 0, 1), shift(0, 0), torch.ones(4, dtype=torch.bool))
    assert torch.equal(moved.nan_to_num(9), x.flip(-1).nan_to_num(9))


def test_colours() -> None:
    zero = torch.zeros(4)
    x = X / 2
    torch.testing.assert_close(_recoloured(x, zero + 0.25, zero, zero, zero), x + 0.25)
    torch.testing.assert_close(_recoloured(x, zero, zero - 1, zero, zero), x / 2)
    third = _recoloured(x / 2, zero, zero, zero + 2 * math.pi / 3, zero)
    torch.testing.assert_close(third, x.roll(1, dims=1) / 2, atol=1e-6, rtol=0)  # red is green, green is blue
    grey = _recoloured(x, zero, zero, zero, zero - 40)
    torch.testing.assert_close(grey, x.mean(dim=1, keepdim=True).expand_as(x))
    extra = torch.cat((x, X[:, :1]), dim=1)
    assert torch.equal(_recoloured(extra, zero + 1, zero, zero, zero)[:, 3:], X[:, :1]), "transparency stays"


def test_rows_that_are_not_changed_are_the_same_and_their_numbers_0() -> None:
    x = X[:1].expand(400, -1, -1, -1)
    with deterministic(BatchRows(0, 0, 400, slice(None))):
        y, numbers = augmented(x, 0.1)
    assert numbers.shape == (400, NUMBERS)
    same = (y == x).flatten(1).all(dim=1)
    assert torch.equal(same, (numbers == 0).all(dim=1))
    assert same.float().mean() == pytest.approx(0.9**5 * 0.95**2, abs=0.08)
    assert y.abs().max() <= 1
    assert torch.isfinite(y).all()


def test_autocast_changes_no_value() -> None:
    """Training augments in the forward pass, which bf16 runs compute under autocast."""
    x = X.repeat(16, 1, 1, 1)
    variants = list[Tensor]()
    for bf16 in (False, True):
        with deterministic(BatchRows(0, 0, 64, slice(None))), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            variants += augmented(x, 0.9)
    assert torch.equal(variants[0], variants[2])
    assert torch.equal(variants[1], variants[3])


@pytest.mark.slow
def test_augmentation_does_not_leak() -> None:
    """Pictures with a bright left half, mirrored, turned and moved half of the time, are generated facing left."""
    torch.manual_seed(0)
    conditions = {"augmentation": AugmentationLabels(NUMBERS)}
    network = Unet(16, (1, 2), 1, conditions, image_size=8, attention_sides=(), blocks_per_level=1)
    flow = RectifiedFlow(network, space=Pixels((1, 8, 8), augmentation=0.5))
    images = torch.full((32, 1, 8, 8), -0.8)
    images[..., :4] = 0.8
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for step in range(200):
        with deterministic(BatchRows(0, step, 32, slice(None))):
            flow(images=images).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(1)
    pictures = flow.sample(64, steps=8)
    faces_left = pictures[..., :4].mean(dim=(1, 2, 3)) > pictures[..., 4:].mean(dim=(1, 2, 3)) + 0.4
    assert faces_left.float().mean() > 0.9
