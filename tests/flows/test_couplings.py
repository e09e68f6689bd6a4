"""Tests of couplings: least cost, classes and the global batch; and of time distributions in closed form."""

from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import ConditionSpecs, Labels
from rectified_flow.data import GlobalBatch
from rectified_flow.flows import Coupling
from rectified_flow.flows.couplings import (
    nearest_candidate,
    optimal_pairs,
    squared_distances,
)
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import LogitNormal, Uniform, UShaped
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.pixels import Pixels


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 2, 2, generator=generator), torch.randn(count, 1, 2, 2, generator=generator)


def cost(x_0: Tensor, noise: Tensor) -> float:
    return (x_0 - noise).square().sum().item()


def test_transport_has_the_least_cost_of_all_permutations() -> None:
    x_0, noise = batch(6)
    least = min(cost(x_0, noise[list(order)]) for order in permutations(range(6)))
    assert cost(x_0, noise[optimal_pairs(squared_distances(x_0, noise))]) == pytest.approx(least)


def test_transport_within_classes() -> None:
    x_0, noise = batch(60)
    labels = torch.arange(60) % 3
    order = optimal_pairs(squared_distances(x_0, noise), labels)
    assert sorted(order.tolist()) == list(range(60))
    assert torch.equal(labels[order], labels)
    assert cost(x_0, noise[order]) < 0.9 * cost(x_0, noise)
    assert cost(x_0, noise[order]) > cost(x_0, noise[optimal_pairs(squared_distances(x_0, noise))])


def test_the_nearest_candidate() -> None:
    x_0 = torch.zeros(2, 3)
    candidates = [torch.tensor([[float(a)] * 3, [float(b)] * 3]) for a, b in ((3, 5), (-1, 4), (2, 6))]
    assert nearest_candidate(x_0, candidates).tolist() == [[-1.0] * 3, [4.0] * 3]


class Silent(nn.Module):
    conditions: ConditionSpecs = {"labels": Labels(2)}  # noqa: RUF012

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x)


def straightness(coupling: Coupling) -> float:
    """The loss of a network that says nothing: the mean squared length of the paths."""
    torch.manual_seed(0)
    flow = RectifiedFlow(Silent(), coupling=coupling)
    return flow(images=torch.randn(128, 1, 2, 2) * 0.5, labels=torch.arange(128) % 2).item()


def test_paths_are_shorter() -> None:
    independent = straightness("independent")
    assert straightness("ot") < 0.7 * independent
    assert straightness("immiscible") < 0.8 * independent


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_parts_of_a_global_batch_get_the_noise_of_the_whole(world_size: int, accumulation: int) -> None:
    """However it is cut, the mean loss is that of the joined batch."""
    images, labels = torch.randn(16, 1, 2, 2) * 0.5, torch.arange(16) % 2
    flow = RectifiedFlow(Silent(), space=Pixels(horizontal_flip=True), coupling="ot")
    with deterministic(BatchRows(0, 3, 16, slice(None))):
        chosen = flow.pair(images=images, labels=labels)
        joined = flow(images=images, labels=labels, noise_rows=chosen)
        assert flow(images=images, labels=labels) == joined, "pairs what is there if nobody did before"
    cut = GlobalBatch(16 // (world_size * accumulation), world_size, accumulation)
    parts = []
    for rank in range(world_size):
        for micro_batch in range(accumulation):
            rows = cut.rows(rank, micro_batch)
            with deterministic(BatchRows(0, 3, 16, rows)):
                parts.append(flow(images=images[rows], labels=labels[rows], noise_rows=chosen[rows]))
    assert torch.stack(parts).mean() == pytest.approx(joined.item())


CPU = torch.device("cpu")
QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_quantiles_of_shifted_times(shift: float) -> None:
    normal = torch.sigmoid(-0.5 + 1.2 * torch.special.ndtri(QUANTILES))
    for times, unshifted in ((LogitNormal(-0.5, 1.2, shift), normal), (Uniform(shift), QUANTILES)):
        expected = shift * unshifted / (1 + (shift - 1) * unshifted)
        torch.testing.assert_close(times.draw(200_000, CPU).quantile(QUANTILES), expected, atol=5e-3, rtol=0)


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
