"""Tests of samples by number, from noise and from pictures."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rectified_flow.flows.flow import sample_batches
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels
from tests.test_load import settings, unet


def flow() -> RectifiedFlow:
    return RectifiedFlow(unet(), **settings()).eval()


def pictures(numbers: Sequence[int], batch_size: int = 64, **how: object) -> dict[int, Tensor]:
    drawn = sample_batches(flow(), numbers, batch_size=batch_size, steps=2, **how)  # type: ignore[arg-type]
    return {i: picture for some, batch in drawn for i, picture in zip(some, batch, strict=True)}


@pytest.mark.parametrize("solver", ["midpoint", "ab2", "dpmpp_2m", "stochastic"])
def test_a_picture_is_the_same_in_any_company(solver: str) -> None:
    together = pictures(range(6), solver=solver)
    assert {picture.dtype for picture in together.values()} == {torch.uint8}
    for numbers, batch_size in (((5, 0, 3), 64), (range(6), 4), ((4,), 1)):
        for i, picture in pictures(numbers, batch_size, solver=solver).items():
            assert (picture.int() - together[i].int()).abs().max() <= 1, "more than rounding"
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0], pictures([0], seed=1)[0])


def test_classes_take_turns() -> None:
    both = pictures(range(4), conditions={"labels": torch.tensor([1, 0])})
    for turn, label in enumerate((1, 0)):
        alone = pictures(range(4), conditions={"labels": torch.tensor([label])})
        for i in range(4):
            assert torch.equal(both[i], alone[i]) == (i % 2 == turn)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_from_pictures(kind: type[RectifiedFlow | MeanFlow]) -> None:
    """A network that predicts no velocity leaves the noisy picture as it is."""
    silent = kind(Unet(8, (1,), image_size=8), space=Pixels((3, 8, 8)))
    given = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    drawn = {
        i: picture
        for level in (0.001, 0.5)
        for some, batch in sample_batches(silent, range(3), start=given, strength=level)
        for i, picture in zip((f"{j} {level}" for j in some), batch, strict=True)
    }
    for i in range(3):
        near, far = (drawn[f"{i} {level}"].int() - given[i % 2].int() for level in (0.001, 0.5))
        assert near.abs().max() <= 1
        assert far.abs().float().mean() > 20
