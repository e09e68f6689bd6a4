"""Tests of solvers on Gaussian data, whose flow map is known; of the multistep solver also exact values."""

from itertools import pairwise
from math import log2
from typing import get_args

import pytest
import torch
from torch import Tensor

from rectified_flow.flows import Solver, TimeGrid
from rectified_flow.flows.solvers import CALLS_PER_STEP, Guidance, guided, integrate
from rectified_flow.flows.times import time_grid
from tests.analytic import image_gaussian
from tests.flows.test_solvers_guidance import KINDS, Field

DATA = image_gaussian()
GRIDS: tuple[TimeGrid, ...] = ("uniform", "shifted", "edm")


def velocity(x: Tensor, t: float) -> Tensor:
    return DATA.velocity(x, torch.tensor(t, dtype=x.dtype))


def line(start: float, end: float, steps: int) -> list[float]:
    return torch.linspace(start, end, steps + 1, dtype=torch.float64).tolist()


def draw(count: int = 64) -> Tensor:
    return torch.randn(count, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("start", "end"), [(0.9, 0.1), (1.0, 0.0)])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2), ("ab2", 2)])
def test_order(solver: Solver, order: int, start: float, end: float) -> None:
    """Halving the step divides the error by two to the order."""
    x = draw()
    exact = DATA.flow_map(x, start, end)

    def error(steps: int) -> float:
        return (integrate(velocity, x, line(start, end, steps), solver) - exact).abs().mean().item()

    assert log2(error(160) / error(320)) > order - 0.1


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


UNEVEN = [1.0, 0.9, 0.65, 0.6, 0.3, 0.0]


@pytest.mark.parametrize("times", [[1.0, 0.0], [0.7, 0.2], UNEVEN])
@pytest.mark.parametrize("solver", CALLS_PER_STEP)
def test_straight_paths_are_exact_in_any_number_of_steps(solver: Solver, times: list[float]) -> None:
    x, v = draw(8), draw(16)[8:]
    end = integrate(lambda x, t: v, x, times, solver)
    assert (end - (x + (times[-1] - times[0]) * v)).abs().max() < 1e-12


def test_ab2_is_exact_for_a_velocity_that_is_linear_in_time_after_its_euler_step() -> None:
    x, times = draw(1), UNEVEN
    end = integrate(lambda x, t: torch.full_like(x, 2 * t), x, times, "ab2")
    expected = 2 * times[0] * (times[1] - times[0]) + times[-1] ** 2 - times[1] ** 2
    assert (end - x - expected).abs().max() < 1e-12


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_leads_to_the_data(grid: TimeGrid) -> None:
    x = draw()
    assert (integrate(velocity, x, time_grid(200, grid), "ab2") - DATA.flow_map(x, 1, 0)).abs().max() < 0.02


@pytest.mark.parametrize("solver", CALLS_PER_STEP)
def test_a_part_that_is_kept_does_not_change_the_steps_of_the_rest(solver: Solver) -> None:
    """The elements of the data are independent, so that the others come out as without a mask."""
    x, times = draw(), time_grid(6, "shifted")
    generated = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    known = torch.full_like(x, 0.3)
    kept = integrate(
        velocity, x, times, solver, inpaint=lambda now, t: torch.where(generated, now, torch.lerp(known, x, t))
    )
    assert torch.equal(kept, torch.where(generated, integrate(velocity, x, times, solver), known))


def test_the_guided_velocity_is_remembered() -> None:
    """The velocity is 2 at first and 9 - 2 * 7 = -5 in the interval, so -5 - 7 / 2 in the third step."""
    field = Field()
    inside = guided(field, KINDS, {"labels": torch.tensor([2])}, Guidance(2.0, (0.2, 0.7)))
    assert integrate(inside, torch.zeros(1, 1), time_grid(4), "ab2").item() == pytest.approx(
        -(2 + 2 + (-5 - 7 / 2) - 5) / 4
    )
    assert field.calls == [1, 1, 2, 2], "one call a step"
