"""The adaptive solver, compared with that of scipy, which has the same method and control of the steps."""

from collections.abc import Callable
from itertools import pairwise
from math import cos, log2

import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from rectified_flow.errors import RunError
from rectified_flow.flows.adaptive import DormandPrince
from rectified_flow.flows.solvers import Velocity, integrate
from tests.analytic import Gaussian, image_gaussian

DATA = image_gaussian()
NARROW = Gaussian(DATA.mean, torch.full_like(DATA.mean, 1e-4))
"""Data whose velocity changes fast near time 0."""


def field(data: Gaussian) -> Velocity:
    return lambda x, t: data.velocity(x, torch.tensor(t, dtype=x.dtype))


def draw(count: int = 1) -> Tensor:
    return torch.randn(count, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def relaxing(rate: float) -> Velocity:
    """A stiff velocity: the solution follows a slow curve, and stability limits the steps."""
    return lambda x, t: rate * (x - cos(5 * t))


def oscillating(rate: float) -> Velocity:
    """The van der Pol oscillator, whose steps differ by large factors."""

    def velocity(x: Tensor, t: float) -> Tensor:
        place, speed = x.unbind(1)
        return rate * torch.stack((speed, 5 * (1 - place**2) * speed - place), dim=1)

    return velocity


class Counted:
    def __init__(self, velocity: Velocity) -> None:
        self.velocity, self.times = velocity, list[float]()

    def __call__(self, x: Tensor, t: float) -> Tensor:
        self.times.append(t)
        return self.velocity(x, t)


def ends_of(velocity: Velocity, x: Tensor, *times: float, tolerance: float = 1e-4) -> list[Tensor]:
    return list(DormandPrince(velocity, tolerance).path(x, list(times)))


def start_of(name: str, ahead: bool) -> Tensor:
    if name == "oscillating":
        return torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    return NARROW.flow_map(draw(), 1.0, 0.0) if name == "narrow" and ahead else draw()


PROBLEMS: dict[str, Callable[[float], Velocity]] = {
    "smooth": lambda sign: field(DATA),
    "narrow": lambda sign: field(NARROW),
    "relaxing": lambda sign: relaxing(-60 * sign),
    "oscillating": lambda sign: oscillating(20 * sign),
}


@pytest.mark.parametrize("tolerance", [1e-4, 1e-6])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_steps_and_results_are_those_of_scipy(problem: str, ahead: bool, tolerance: float) -> None:
    times = (0.0, 1.0) if ahead else (1.0, 0.0)
    velocity, x = PROBLEMS[problem](1.0 if ahead else -1.0), start_of(problem, ahead)
    counted = Counted(velocity)
    [end] = ends_of(counted, x, *times, tolerance=tolerance)

    def flat(t: float, y: Tensor) -> Tensor:
        return velocity(torch.as_tensor(y).view_as(x), t).flatten()

    truth = solve_ivp(flat, times, x.flatten(), method="RK45", rtol=tolerance, atol=tolerance)
    assert len(counted.times) == pytest.approx(truth.nfev, rel=0.03)
    expected = torch.from_numpy(truth.y[:, -1]).view_as(x)
    assert (end - expected).abs().max() < tolerance / 10
    assert 0 <= min(counted.times) <= max(counted.times) <= 1, "a network knows nothing beyond"


def test_equal_steps_have_order_5_and_their_estimates_order_4() -> None:
    """On ``dx/dt = -2 t x^2``, which is solved by ``1 / (1 / x + t^2)``. The error of one step has an order more."""

    def velocity(x: Tensor, t: float) -> Tensor:
        return -2 * t * x**2

    def errors(steps: int) -> tuple[float, float]:
        x = start = torch.tensor([[0.5], [0.3]], dtype=torch.float64)
        slope, largest = velocity(x, 1.0), 0.0
        for t, t_next in pairwise(torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()):
            x, slope, estimate = DormandPrince(velocity).step(x, slope, t, t_next)
            assert torch.equal(slope, velocity(x, t_next))
            largest = max(largest, estimate.abs().mean().item())
        return (x - 1 / (1 / start - 1)).abs().mean().item(), largest

    few, many = errors(32), errors(64)
    assert log2(few[0] / many[0]) == pytest.approx(5, abs=0.2)
    assert log2(few[1] / many[1]) == pytest.approx(5, abs=0.2)


def test_straight_paths_are_exact_in_few_steps() -> None:
    x, v = draw(4), draw(8)[4:]
    counted = Counted(lambda x, t: v)
    [end] = ends_of(counted, x, 1.0, 0.0)
    assert (end - (x - v)).abs().max() < 1e-12
    assert len(counted.times) <= 2 + 6 * 3


def test_each_row_has_the_tolerance_in_any_batch() -> None:
    """The mean of errors over the batch, in place of the largest row's, would be small because of easy rows."""
    x, velocity = draw(), field(NARROW)

    def in_company(x: Tensor, t: float) -> Tensor:
        return torch.cat((velocity(x[:1], t), torch.zeros_like(x[1:])))

    [alone] = ends_of(velocity, x, 1.0, 0.0)
    [together] = ends_of(in_company, torch.cat((x, torch.zeros(999, 3, 4, 4, dtype=x.dtype))), 1.0, 0.0)
    assert torch.allclose(together[:1], alone, rtol=0, atol=1e-12)


def test_the_way_passes_each_stop_without_tiny_steps() -> None:
    times = [1.0, 0.7, 0.3, 0.0]
    counted, x = Counted(field(DATA)), draw()
    for t, there in zip(times[1:], ends_of(counted, x, *times), strict=True):
        assert (there - DATA.flow_map(x, 1.0, t)).abs().max() < 1e-3
    assert {*times} <= {*counted.times}
    alone = Counted(field(DATA))
    ends_of(alone, x, 1.0, 0.0)
    assert len(counted.times) <= len(alone.times) + 6 * 3, "at most one more step for each stop"


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("broken_from", [1.0, 0.5])
def test_a_velocity_that_is_not_finite_ends_the_run(broken_from: float, factor: float) -> None:
    with pytest.raises(RunError, match="no step of --solver adaptive meets its tolerance at time"):
        integrate(lambda x, t: x * (factor if t <= broken_from else 1.0), draw(), [1.0, 0.0], "adaptive")


def test_the_velocity_at_the_data_is_not_used_if_it_does_not_exist() -> None:
    counted = Counted(lambda x, t: (x - 0.5) / t)
    end = integrate(counted, draw(), [1.0, 0.0], "adaptive", evaluate_at_data=False)
    assert (end - 0.5).abs().max() < 1e-9
    assert min(counted.times) == 1e-3
