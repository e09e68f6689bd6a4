"""Tests of couplings: least cost, classes, and the global batch."""

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
