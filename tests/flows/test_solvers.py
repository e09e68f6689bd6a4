"""Tests of solvers on Gaussian data, with a known flow map and exact values of multistep solvers, and of guidance."""

from itertools import pairwise
from math import log2
from typing import Any, get_args

import diffusers
import pytest
import torch
from torch import Tensor

from rectified_flow.condition import ConditionSpecs, Labels, Number
from rectified_flow.errors import UsageError
from rectified_flow.flows import Solver, TimeGrid
from rectified_flow.flows.solvers import CALLS_PER_STEP, Guidance, guided, integrate
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


KINDS: ConditionSpecs = {"labels": Labels(9)}
"""The label 9 stands for none."""


class Field:
    """A velocity equal to the label, whose calls are counted."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        self.calls.append(len(x))
        assert len(t) == len(x)
        assert labels is not None
        return labels.float()[:, None].expand_as(x)


@pytest.mark.parametrize(("scale", "expected"), [(0.0, 9.0), (1.0, 2.0), (3.0, -12.0)])
def test_the_velocity_goes_from_no_label_through_the_label(scale: float, expected: float) -> None:
    """9 + scale * (2 - 9)"""
    field = Field()
    velocity = guided(field, KINDS, {"labels": torch.tensor([2, 2])}, Guidance(scale))
    assert torch.equal(velocity(torch.zeros(2, 3), 0.5), torch.full((2, 3), expected))
    assert field.calls == [2 if scale == 1 else 4], "one call, of twice the rows"


@pytest.mark.parametrize(("t", "acts"), [(0.1, False), (0.2, True), (0.7, True), (0.8, False)])
def test_it_acts_inside_the_interval(t: float, acts: bool) -> None:
    field = Field()
    velocity = guided(field, KINDS, {"labels": torch.tensor([2])}, Guidance(2.0, (0.2, 0.7)))
    assert velocity(torch.zeros(1, 1), t).item() == (-5 if acts else 2)
    assert field.calls == [2 if acts else 1]


def test_autoguidance_extrapolates_from_an_earlier_velocity() -> None:
    """Earlier + 2 * (own - earlier), inside the interval only, for the conditional and the unconditional velocity."""
    own, earlier = Field(), Field()
    half = lambda x, t, labels: earlier(x, t, labels) / 2  # noqa: E731
    guidance = Guidance(3.0, (0.2, 0.7), autoguidance=2.0, earlier=half)
    velocity = guided(own, KINDS, {"labels": torch.tensor([2])}, guidance)
    conditional, unconditional = 1 + 2 * (2 - 1), 4.5 + 2 * (9 - 4.5)
    assert velocity(torch.zeros(1, 1), 0.5).item() == unconditional + 3 * (conditional - unconditional)
    assert own.calls == earlier.calls == [2]
    assert velocity(torch.zeros(1, 1), 0.1).item() == 2


def test_autoguidance_narrows_a_distribution_that_is_too_wide_in_the_earlier_version() -> None:
    """Expect samples of the deviation s^w r^(1 - w) for Gaussian velocities of the deviations s (own) and r (earlier).

    The velocity at (x, t) for data of N(0, s^2) is x times a factor, whose integral from 0 to 1 is -log(s). The
    extrapolated velocity is linear in x as well.
    """

    def velocity_of(deviation: float):  # type: ignore[no-untyped-def]
        def velocity(x: Tensor, t: Tensor) -> Tensor:
            t, variance = t[:, None], deviation**2
            return x * (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance)

        return velocity

    noise = torch.randn(64, 1, dtype=torch.float64)
    guidance = Guidance(autoguidance=2.0, earlier=velocity_of(1.5))
    field = guided(velocity_of(1.0), {}, {}, guidance)
    generated = integrate(field, noise, time_grid(400), "midpoint")
    torch.testing.assert_close(generated / noise, torch.full_like(noise, 1 / 1.5), rtol=1e-4, atol=0)


def test_all_conditions_are_none_together() -> None:
    """The unconditional rows have neither the label nor the number."""
    seen: list[tuple[Tensor, Tensor]] = []

    def field(x: Tensor, t: Tensor, labels: Tensor, place: Tensor) -> Tensor:
        seen.append((labels, place))
        return x

    conditions = {"labels": torch.tensor([2]), "place": torch.ones(1)}
    guided(field, {**KINDS, "place": Number((0, 1))}, conditions, Guidance(2.0))(torch.zeros(1, 1), 0.5)
    [(labels, place)] = seen
    assert labels.tolist() == [2, 9]
    assert torch.equal(place.isnan(), torch.tensor([False, True]))


def test_each_condition_has_a_scale_of_its_own() -> None:
    """The velocity is a sum of two conditions, and each is extrapolated by its own scale: 9 + w (2 - 9), and 2 w."""
    calls = []

    def field(x: Tensor, t: Tensor, labels: Tensor, place: Tensor) -> Tensor:
        calls.append(len(x))
        return (labels + place.nan_to_num(0))[:, None]

    kinds: ConditionSpecs = {**KINDS, "place": Number((0, 1))}
    conditions = {"labels": torch.tensor([2]), "place": torch.tensor([2.0])}

    def at(guidance: Guidance) -> float:
        return guided(field, kinds, conditions, guidance)(torch.zeros(1, 1), 0.5).item()

    assert at(Guidance(scales={"labels": 3.0})) == 9 + 3 * (2 - 9) + 2
    assert at(Guidance(scales={"labels": 3.0, "place": 5.0})) == 9 + 3 * (2 - 9) + 10
    assert at(Guidance(scales={"labels": 0.0, "place": 1.0})) == 9 + 2
    assert at(Guidance(2.0, scales={"place": 5.0})) == 2 + 2 + (2 - 1) * (4 - 9) + (5 - 1) * 2
    assert calls == [2, 3, 2, 3]
    conditions["place"] = torch.tensor([torch.nan])
    assert at(Guidance(2.0, scales={"place": 5.0})) == 9 + 2 * (2 - 9)
    assert calls[4:] == [2], 'a scale adds no rows if its condition is "none"'
    with pytest.raises(UsageError, match=r"`scales` of Guidance has colour, which .*: pass labels, place"):
        guided(field, kinds, conditions, Guidance(scales={"colour": 2.0}))
    with pytest.raises(ValueError, match="needs a network that takes conditions"):
        guided(field, kinds, {}, Guidance(2))
