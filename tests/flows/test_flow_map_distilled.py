"""Tests of distillation against closed forms, and of the points and times drawn from a path."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.errors import UsageError
from rectified_flow.flows.flow_map import DistilledFlow
from tests.analytic import Gaussian, image_gaussian
from tests.flows.test_mean import Optimal

POINTS = 8


def path_of(data: Gaussian, noise: Tensor) -> Tensor:
    """The exact path from noise to data: all points at times 1, 7/8, ..., 0."""
    times = (torch.arange(POINTS, -1, -1) / POINTS).reshape(-1, 1, 1, 1, 1)
    one = torch.ones(())
    return (noise - (one - times) * data.average_velocity(noise[None], one, times)).transpose(0, 1)


def evaluate() -> tuple[float, float]:
    """The mean squared error of the exact average velocity on exact paths, and the norm of its gradient."""
    data = image_gaussian().float()
    torch.manual_seed(0)
    points = path_of(data, torch.randn(2000, 3, 4, 4))
    flow = DistilledFlow(Optimal(data), weight_power=0)
    loss = forward(flow, points)
    loss.backward()
    gradient = flow.network.errors.grad
    assert isinstance(gradient, Tensor)
    return flow.logged["unweighted_loss"].item(), gradient.norm().item()


def forward(flow: DistilledFlow, points: Tensor) -> Tensor:
    """The loss on paths that are not rounded to pixels."""
    flow.space.encode = lambda data: data  # type: ignore[method-assign]
    return flow(images=points[:, -1], path=points[:, :-1])


def test_the_exact_average_velocity_has_no_error_and_no_gradient() -> None:
    mean_square, gradient = evaluate()
    assert mean_square < 1e-9
    assert gradient < 0.02


class Recorder(nn.Module):
    """Keeps the times and conditions that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
        self.seen.append((t, r))
        return x * self.weight


@pytest.mark.parametrize("halves", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("fraction", "whole"), [(0.5, 2000), (0.0, 0), (1.0, 4000)])
def test_the_first_rows_learn_whole_paths_and_the_others_halves_and_all_parts(
    fraction: float, whole: int, halves: float
) -> None:
    flow = DistilledFlow(Recorder(), whole_fraction=fraction, halves_fraction=halves)
    torch.manual_seed(0)
    forward(flow, torch.randn(4000, POINTS + 1, 1, 1, 1))
    assert isinstance(flow.network, Recorder)
    [(t, r)] = flow.network.seen
    assert (t[:whole] == 1).all()
    assert (r[:whole] == 0).all()
    parts = Counter((a.item(), b.item()) for a, b in zip(t[whole:], r[whole:], strict=True))
    every = {(later / POINTS, earlier / POINTS) for later in range(1, POINTS + 1) for earlier in range(later)}
    two = {(1.0, 0.5), (0.5, 0.0)}
    assert parts.keys() == ((two if halves == 1 else every) if whole < 4000 else set())
    for later, earlier in two if parts else ():
        by_chance = (1 - halves) / POINTS / (POINTS * later)
        assert parts[later, earlier] / (4000 - whole) == pytest.approx(halves / 2 + by_chance, abs=0.03)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_halves_of_paths_with_few_points_begin_and_end_in_points(steps: int) -> None:
    flow = DistilledFlow(Recorder(), whole_fraction=0, halves_fraction=1)
    torch.manual_seed(0)
    forward(flow, torch.randn(200, steps + 1, 1, 1, 1))
    assert isinstance(flow.network, Recorder)
    [(t, r)] = flow.network.seen
    parts = {(round(steps * a.item()), round(steps * b.item())) for a, b in zip(t, r, strict=True)}
    assert parts == {1: {(1, 0)}, 2: {(2, 1), (1, 0)}, 3: {(3, 1), (1, 0)}}[steps]


def test_a_share_of_less_than_a_row_is_refused() -> None:
    one = {"images": torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "path": torch.zeros(1, 3, 3, 8, 8)}
    with pytest.raises(UsageError, match=r"0.5 of a micro-batch of 1 is less than one row: raise --batch_size"):
        DistilledFlow(Recorder())(**one)
    DistilledFlow(Recorder()).eval()(**one)
