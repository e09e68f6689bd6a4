"""Tests of solvers on Gaussian data, whose flow map is known; of multistep solvers also exact values and both ends."""

from itertools import pairwise
from math import log2
from typing import Any, get_args

import diffusers
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


MULTISTEP: tuple[Solver, ...] = ("ab2", "dpmpp_2m")
UNEVEN = [1.0, 0.9, 0.65, 0.6, 0.3, 0.0]
WAYS = (UNEVEN, UNEVEN[::-1])


@pytest.mark.parametrize("times", [[1.0, 0.0], [0.0, 1.0], [0.7, 0.2], *WAYS])
@pytest.mark.parametrize("solver", [solver for solver in CALLS_PER_STEP if solver != "stochastic"])
def test_straight_paths_are_exact_in_any_number_of_steps(solver: Solver, times: list[float]) -> None:
    x, v = draw(8), draw(16)[8:]
    end = integrate(lambda x, t: v, x, times, solver)
    assert (end - (x + (times[-1] - times[0]) * v)).abs().max() < 1e-12


@pytest.mark.parametrize("times", WAYS)
def test_ab2_is_exact_for_a_velocity_that_is_linear_in_time_after_its_euler_step(times: list[float]) -> None:
    x = draw(1)
    end = integrate(lambda x, t: torch.full_like(x, 2 * t), x, times, "ab2")
    expected = 2 * times[0] * (times[1] - times[0]) + times[-1] ** 2 - times[1] ** 2
    assert (end - x - expected).abs().max() < 1e-12


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("grid", GRIDS)
def test_dpmpp_2m_is_that_of_diffusers(grid: TimeGrid, steps: int) -> None:
    times = time_grid(steps, grid)
    scheduler: Any = diffusers.DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True
    )
    scheduler.set_timesteps(steps)
    scheduler.sigmas = torch.tensor(times, dtype=torch.float64)
    x = start = draw()
    for t, timestep in zip(times, scheduler.timesteps, strict=False):
        x = scheduler.step(velocity(x, t), timestep, x).prev_sample
    assert (integrate(velocity, start, times, "dpmpp_2m") - x).abs().max() < 2e-6, "more than its rounding to float32"


@pytest.mark.parametrize(("solver", "least"), [("ab2", 1.95), ("dpmpp_2m", 1.7)])
@pytest.mark.parametrize("ends", [(1.0, 0.0), (0.0, 1.0)])
def test_order_between_the_ends(solver: Solver, least: float, ends: tuple[float, float]) -> None:
    """The error of DPM-Solver++(2M) falls with the square of the step times its logarithm, as steps of l are large."""
    x = draw()
    exact = DATA.flow_map(x, *ends)

    def error(steps: int) -> float:
        return (integrate(velocity, x, line(*ends, steps), solver) - exact).abs().mean().item()

    assert least < log2(error(160) / error(320)) < 2.05


@pytest.mark.parametrize("solver", MULTISTEP)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_leads_to_the_data_and_back(grid: TimeGrid, solver: Solver) -> None:
    x, times = draw(), time_grid(200, grid)
    end = integrate(velocity, x, times, solver)
    assert (end - DATA.flow_map(x, 1, 0)).abs().max() < 0.02
    assert (integrate(velocity, end, times[::-1], solver) - x).abs().max() < 0.2


@pytest.mark.parametrize("solver", MULTISTEP)
def test_a_part_that_is_kept_does_not_change_the_steps_of_the_rest(solver: Solver) -> None:
    """The elements of the data are independent, so that the others come out as without a mask."""
    x, times = draw(), time_grid(6, "shifted")
    generated = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    known = torch.full_like(x, 0.3)
    kept = integrate(
        velocity, x, times, solver, inpaint=lambda now, t: torch.where(generated, now, torch.lerp(known, x, t))
    )
    assert torch.equal(kept, torch.where(generated, integrate(velocity, x, times, solver), known))


@pytest.mark.parametrize("solver", MULTISTEP)
def test_the_guided_velocity_is_remembered(solver: Solver) -> None:
    """The velocity is 2 at first and 9 - 2 * 7 = -5 in the interval: by the step before, -5 - 7 / 2 in the third step.

    With DPM-Solver++(2M), the second step has no correction as the first starts at time 1, and the last is an Euler
    step. In the third, ``l`` changes by log 3 as in the second, and the earlier prediction is at velocity 2.
    """
    field = Field()
    inside = guided(field, KINDS, {"labels": torch.tensor([2])}, Guidance(2.0, (0.2, 0.7)))
    assert integrate(inside, torch.zeros(1, 1), time_grid(4), solver).item() == pytest.approx(
        -(2 + 2 + (-5 - 7 / 2) - 5) / 4
    )
    assert field.calls == [1, 1, 2, 2], "one call a step"
