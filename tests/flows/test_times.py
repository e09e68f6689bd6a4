"""Tests of time distributions against their closed forms."""

import pytest
import torch

from rectified_flow.flows.times import LogitNormal, Uniform, UShaped
from rectified_flow.randomness import BatchRows, deterministic

CPU = torch.device("cpu")
QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_logit_normal_quantiles(shift: float) -> None:
    times = LogitNormal(-0.5, 1.2, shift).draw(200_000, CPU)
    z = torch.special.ndtri(QUANTILES)
    unshifted = torch.sigmoid(-0.5 + 1.2 * z)
    expected = shift * unshifted / (1 + (shift - 1) * unshifted)
    torch.testing.assert_close(times.quantile(QUANTILES), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_quantiles(shift: float) -> None:
    times = Uniform(shift).draw(200_000, CPU)
    expected = shift * QUANTILES / (1 + (shift - 1) * QUANTILES)
    torch.testing.assert_close(times.quantile(QUANTILES), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("steepness", [1.0, 4.0])
def test_u_shaped_quantiles(steepness: float) -> None:
    """The share of times up to t is the integral of cosh(a (t - 1/2)), divided by that over all of [0, 1]."""
    times = UShaped(steepness).draw(200_000, CPU)
    fine = torch.linspace(0, 1, 10_001)
    density = torch.cosh(steepness * (fine - 0.5))
    share = torch.cumulative_trapezoid(density, fine) / torch.trapezoid(density, fine)
    expected = fine[1:][torch.searchsorted(share, QUANTILES)]
    torch.testing.assert_close(times.quantile(QUANTILES), expected, atol=5e-3, rtol=0)
    assert 0 <= times.min() < 1e-3
    assert 1 >= times.max() > 1 - 1e-3


def test_stratified_times_are_one_in_each_range_on_any_number_of_ranks() -> None:
    """Each range between the quantiles i / b and (i + 1) / b has the time of one row of the global batch."""
    distribution, plain = LogitNormal(-0.5, 1.2, stratified=True), LogitNormal(-0.5, 1.2)
    with deterministic(BatchRows(0, 7, 8, slice(None))):
        whole = distribution.draw(8, CPU)
    shares = torch.special.ndtr((torch.logit(whole) + 0.5) / 1.2)
    assert sorted((shares * 8).int().tolist()) == list(range(8))
    for rank in range(2):
        with deterministic(BatchRows(0, 7, 8, slice(rank, None, 2))):
            torch.testing.assert_close(distribution.draw(4, CPU), whole[rank::2], rtol=0, atol=0)
    many = distribution.draw(200_000, CPU).quantile(QUANTILES)
    torch.testing.assert_close(many, plain.draw(200_000, CPU).quantile(QUANTILES), atol=5e-3, rtol=0)
