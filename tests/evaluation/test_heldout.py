"""Tests of the loss on held-out pictures, and of the decision that a run memorises."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation.heldout import PATIENCE, TIMES, HeldOutLoss, HeldOutPictures, judge
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.pixels import Pixels
from tests.training.runs import tiny_dataset


class Scaled(nn.Module):
    """Predicts a multiple of ``x``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None) -> Tensor:
        return self.factor * x


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> ImageDataset:
    return tiny_dataset(tmp_path_factory.mktemp("cache"))


def pictures(flowers: ImageDataset, seed: int = 0) -> HeldOutPictures:
    return HeldOutPictures(flowers.subset(range(20)), flowers.subset(range(20, 46)), seed)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_it_is_the_squared_error_of_the_velocity(flowers: ImageDataset, kind: Any) -> None:
    """``x_t = (1 - t) x_0 + t noise``: a prediction of ``k x_t`` misses ``noise - x_0`` by what is known for each."""
    compared, flow = pictures(flowers), kind(Scaled(0.5), space=Pixels(horizontal_flip=True))
    assert compared.count == 20
    losses = compared.losses(flow, range(40))
    x_0 = flow.space.encode(flowers.read_batch(range(46))["images"])
    power = x_0.square().flatten(1).mean(dim=1)
    t = (torch.arange(TIMES) + 0.5) / TIMES
    expected = ((0.5 * t - 1) ** 2).mean() + ((0.5 * (1 - t) + 1) ** 2).mean() * power  # cross terms vanish on average
    assert losses[20:].mean().item() == pytest.approx(expected[:20].mean().item(), rel=0.02)
    assert losses[:20].mean().item() == pytest.approx(expected[20:].mean().item(), rel=0.03)
    means = compared.means(losses)
    assert means["gap"] == pytest.approx(means["heldout_loss"] - means["seen_loss"])
    assert flow.training


def test_the_noise_is_always_the_same(flowers: ImageDataset) -> None:
    flow = RectifiedFlow(Scaled(0.5))
    losses = pictures(flowers).losses(flow, range(40))
    torch.manual_seed(5)
    torch.testing.assert_close(pictures(flowers).losses(flow, [33, 2, 7]), losses[[33, 2, 7]])
    assert not torch.allclose(pictures(flowers, seed=1).losses(flow, range(40)), losses)


def rows(*held_out: float, seen: tuple[float, ...] = (), noise: float = 0.02) -> list[HeldOutLoss]:
    """Measurements on 64 pictures that differ by 0.3 from each other, and by ``noise`` from one to the next."""
    random = np.random.default_rng(0)
    own = random.normal(0, 0.3, 64)
    result = []
    for step, (loss, other) in enumerate(zip(held_out, seen or range(0, -len(held_out), -1), strict=True)):
        losses = loss + own + random.normal(0, noise, 64)
        result.append(HeldOutLoss(step, losses.mean(), float(other), losses.mean() - float(other), losses.tolist()))
    return result


def test_a_rise_beyond_its_noise_is_noticed_after_some_patience() -> None:
    """The noise is that of the rise, 0.02 / 8, and not that of the pictures, 0.3 / 8."""
    falls, rises = [1.0, 0.8, 0.7], [0.72, 0.73, 0.75]
    assert len(rises) == PATIENCE
    assert judge(rows(*falls, *rises[:-1])) == (judge(rows(*falls)).best, False)
    best, memorises = judge(rows(*falls, *rises))
    assert (best.step, memorises) == (2, True)
    assert not judge(rows(*falls, *rises, noise=0.3)).memorises, "not beyond its noise"
    assert not judge(rows(*falls, 0.72, 0.7, 0.75)).memorises, "not three in a row"


def test_a_loss_that_rises_everywhere_is_no_memorising() -> None:
    assert not judge(rows(0.7, 0.72, 0.73, 0.75, seen=(0.7, 0.72, 0.74, 0.75))).memorises
    assert judge(rows(0.7, 0.72, 0.73, 0.75, seen=(0.7, 0.68, 0.67, 0.66))).memorises
