"""Transport plans equal those of another solver, and the known assignments."""

import ot
import pytest
import torch
from torch import Tensor

import point_clouds
from geometry import Euclidean, FlatTorus
from rectified_flow.randomness import BatchRows, deterministic
from transport import barycentric, cloud_costs, drawn_targets, plans


def weighted_clouds() -> tuple[Tensor, Tensor, Tensor]:
    """Costs between four pairs of clouds, and the weights of their points, some of which are absent."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 12, 2, generator=generator), 0.5 * torch.randn(4, 15, 2, generator=generator) + 1
    a, b = torch.rand(4, 12, generator=generator), torch.rand(4, 15, generator=generator)
    a[:, 8:], b[:, :3] = 0, 0
    cost = Euclidean().squared_distance(x[:, :, None], y[:, None])
    return cost, point_clouds.shares(a), point_clouds.shares(b)


def test_a_known_assignment_is_found_for_all_clouds_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    places = 2.0 * torch.arange(8.0)[:, None].expand(5, 8, 2)
    orders = torch.stack([torch.randperm(8, generator=generator) for _ in range(5)])
    x = places + 0.1 * torch.randn(5, 8, 2, generator=generator)
    y = x.gather(1, orders[..., None].expand(-1, -1, 2)) + 0.1
    w = torch.full((5, 8), 1 / 8)
    plan = plans(Euclidean().squared_distance(x[:, :, None], y[:, None]), w, w)
    assert torch.equal(plan.argmax(dim=2), orders.argsort(dim=1))
    assert torch.equal(drawn_targets(plan), orders.argsort(dim=1))
    assert torch.allclose(plan.amax(dim=2), w, atol=1e-4)
    assert torch.allclose(barycentric(plan, x, y, Euclidean()), x + 0.1, atol=1e-4)


@pytest.mark.parametrize("regularisation", [0.1, 0.02])
def test_plans_are_near_those_of_a_converged_solver(regularisation: float) -> None:
    cost, a, b = weighted_clouds()
    ours = plans(cost, a, b, regularisation)
    assert torch.allclose(ours.sum(dim=1), b, atol=1e-6), "the sums over sources are exact"
    assert (ours[:, 8:] == 0).all()
    assert (ours[:, :, :3] == 0).all()
    for k in range(len(cost)):
        p, q, costs = (each[k].double().numpy() for each in (a, b, cost))
        p, q = p / p.sum(), q / q.sum()
        here, there = p > 0, q > 0
        entropic = ot.sinkhorn(
            p[here], q[there], costs[here][:, there], regularisation * (p @ costs @ q), method="sinkhorn_log"
        )
        assert abs(ours[k].double().numpy()[here][:, there] - entropic).sum() < 0.2, "of a total mass of 1"
        assert (ours[k] * cost[k]).sum().item() == pytest.approx((entropic * costs[here][:, there]).sum(), rel=0.1)


def test_a_plan_depends_on_its_own_clouds_alone() -> None:
    """Hence processes that have different parts of a batch find the same plans."""
    cost, a, b = weighted_clouds()
    together = plans(cost, a, b)
    for k in range(len(cost)):
        assert torch.equal(plans(cost[k : k + 1], a[k : k + 1], b[k : k + 1])[0], together[k])


def test_equal_points_have_the_independent_plan() -> None:
    w = torch.full((1, 3), 1 / 3)
    assert torch.allclose(plans(torch.zeros(1, 3, 3), w, w), torch.full((1, 3, 3), 1 / 9))


def test_targets_are_drawn_with_the_probabilities_of_the_plan() -> None:
    plan = torch.tensor([[[0.1, 0.3, 0.0], [0.0, 0.0, 0.6]]]).expand(2000, -1, -1)
    with deterministic(BatchRows(0, 1, 2000, slice(None))):
        drawn = drawn_targets(plan)
    assert set(drawn[:, 0].tolist()) == {0, 1}
    assert (drawn[:, 0] == 1).float().mean() == pytest.approx(0.75, abs=0.03)
    assert (drawn[:, 1] == 2).all()


def test_costs_of_clouds_rank_them_like_exact_costs() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.rand(40, 6, 2, generator=generator), torch.rand(40, 6, 2, generator=generator)
    w = torch.full((40, 6), 1 / 6)
    costs = cloud_costs(x, w, y, w, FlatTorus(2))
    cost = FlatTorus(2).squared_distance(x[:, :, None], y[:, None])
    exact = torch.tensor([ot.emd2([], [], each.double().numpy()) for each in cost], dtype=torch.float32)
    assert torch.corrcoef(torch.stack((costs, exact)))[0, 1] > 0.97
