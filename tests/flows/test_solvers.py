"""Tests of solvers on Gaussian data, whose flow map is known."""

from itertools import pairwise
from math import log2
from typing import get_args

import pytest
import torch
from torch import Tensor

from rectified_flow.flows import Solver, TimeGrid
from rectified_flow.flows.solvers import CALLS_PER_STEP, integrate
from rectified_flow.flows.times import time_grid
from tests.analytic import image_gaussian

DATA = image_gaussian()
GRIDS: tuple[TimeGrid, ...] = ("uniform", "shifted", "edm")


def velocity(x: Tensor, t: float) -> Tensor:
    return DATA.velocity(x, torch.tensor(t, dtype=x.dtype))


def line(start: float, end: float, steps: int) -> list[float]:
    return torch.linspace(start, end, steps + 1, dtype=torch.float64).tolist()


def draw(count: int = 64) -> Tensor:
    return torch.randn(count, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("start", "end"), [(0.9, 0.1), (0.1, 0.9)])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2), ("ab2", 2), ("dpmpp_2m", 2)])
def test_order(solver: Solver, order: int, start: float, end: float) -> None:
    """Halving the step divides the error by two to the order, towards the data and back."""
    x = draw()
    exact = DATA.flow_map(x, start, end)

    def error(steps: int) -> float:
        return (integrate(velocity, x, line(start, end, steps), solver) - exact).abs().mean().item()

    assert log2(error(80) / error(160)) > order - 0.1


def test_stochastic_keeps_the_distribution_at_each_time() -> None:
    """Other pictures come out than without fresh noise, of the same mean and variance all along."""
    torch.manual_seed(0)
    x = draw(5_000)
    seen: list[tuple[float, Tensor]] = []
    end = integrate(velocity, x, line(1, 0, 100), "stochastic", watch=lambda t, x: seen.append((t, x)))
    for t, there in seen[25::25]:
        time = torch.tensor(t)
        assert (there.mean(0) - (1 - time) * DATA.mean).abs().max() < 0.05
        assert ((there.var(0) / DATA.marginal(time)) - 1).abs().max() < 0.15
    assert (end - DATA.flow_map(x, 1, 0)).abs().mean() > 0.1


@pytest.mark.parametrize("solver", CALLS_PER_STEP)
def test_steps_are_intervals_and_calls_are_counted(solver: Solver) -> None:
    calls: list[float] = []

    def counted(x: Tensor, t: float) -> Tensor:
        calls.append(t)
        return velocity(x, t)

    integrate(counted, draw(2), time_grid(5), solver)
    assert len(calls) == 5 * CALLS_PER_STEP[solver]
    assert {*get_args(Solver)} == {*CALLS_PER_STEP}


@pytest.mark.parametrize("start", [1.0, 0.6, 0.001])
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("steps", [1, 2, 16])
def test_a_grid_falls_from_the_start_to_zero(kind: TimeGrid, steps: int, start: float) -> None:
    times = time_grid(steps, kind, start)
    assert len(times) == steps + 1
    assert (times[0], times[-1]) == (start, 0)
    assert all(t > later for t, later in pairwise(times))


def test_grids_have_the_published_values() -> None:
    assert time_grid(2, "shifted")[1] == pytest.approx(3 * 0.5 / (1 + 2 * 0.5))
    sigma = (80 ** (1 / 7) + 0.5 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert time_grid(2, "edm")[1] == pytest.approx(sigma / (1 + sigma))


@pytest.mark.parametrize(("steps", "start"), [(0, 1.0), (-1, 1.0), (4, 0.0), (4, 1.5)])
def test_senseless_grids_are_refused(steps: int, start: float) -> None:
    with pytest.raises(ValueError, match=r"must be|at least 1"):
        time_grid(steps, start=start)
