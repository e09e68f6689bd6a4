"""Transport plans equal those of another library."""

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from geometry import Euclidean, FlatTorus
from transport import barycentric, cloud_costs, drawn_targets, sinkhorn


def clouds(weighted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Costs between four pairs of clouds, and the weights of their points."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 12, 2, generator=generator), 0.5 * torch.randn(4, 15, 2, generator=generator) + 1
    a, b = torch.ones(4, 12), torch.ones(4, 15)
    if weighted:
        a, b = torch.rand(4, 12, generator=generator), torch.rand(4, 15, generator=generator)
        a[:, 8:], b[:, :3] = 0, 0
    cost = Euclidean().squared_distance(x[:, :, None], y[:, None])
    return cost, a / a.sum(dim=1, keepdim=True), b / b.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("regularisation", [1e-1, 1e-2, 1e-3])
def test_plans_are_those_of_pot(weighted: bool, regularisation: float) -> None:
    cost, a, b = clouds(weighted)
    plans = sinkhorn(cost, a, b, regularisation=regularisation, tolerance=1e-5)
    compared = 0
    for k in range(len(cost)):
        weights, others, costs = (each[k].double().numpy() for each in (a, b, cost))
        weights, others = weights / weights.sum(), others / others.sum()
        here, there = weights > 0, others > 0
        theirs = np.zeros_like(costs)
        theirs[np.ix_(here, there)], log = ot.sinkhorn(
            weights[here],
            others[there],
            costs[np.ix_(here, there)],
            regularisation * (weights @ costs @ others),
            method="sinkhorn_log",
            numItermax=5_000,
            stopThr=1e-8,
            log=True,
        )
        if log["err"][-1] > 1e-6:  # it has not converged; this one has
            continue
        compared += 1
        assert np.abs(plans[k].numpy() - theirs).max() < 1e-5
        assert (plans[k] * cost[k]).sum().item() == pytest.approx((theirs * costs).sum(), rel=1e-4)
        if regularisation == 1e-3:
            assert (plans[k] * cost[k]).sum().item() == pytest.approx(ot.emd2(weights, others, costs), rel=1e-3)
    assert compared >= 2


def test_far_apart_groups_of_points_cost_what_the_exact_transport_costs() -> None:
    """Where one plan is much better than the others, the regularisation has no say: equal to the exact one to 1e-4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(8.0)[:, None].expand(1, 8, 2) + 0.1 * torch.randn(1, 8, 2, generator=generator)
    y = x[:, torch.randperm(8, generator=generator)] + 0.1
    cost, w = Euclidean().squared_distance(x[:, :, None], y[:, None]), torch.full((1, 8), 1 / 8)
    plan = sinkhorn(cost, w, w, regularisation=1e-3)
    exact = ot.emd(w[0].double().numpy(), w[0].double().numpy(), cost[0].double().numpy())
    assert np.abs(plan[0].numpy() - exact).max() < 1e-4
    assert torch.allclose(barycentric(plan, x, y, Euclidean()), x + 0.1, atol=1e-4)


def test_a_plan_is_a_function_of_its_own_row() -> None:
    cost, a, b = clouds(weighted=True)
    together = sinkhorn(cost, a, b)
    for k in range(len(cost)):
        assert torch.allclose(sinkhorn(cost[k : k + 1], a[k : k + 1], b[k : k + 1])[0], together[k], atol=1e-7)


def test_plans_without_an_answer_are_finite() -> None:
    same, w = torch.zeros(1, 3, 3), torch.full((1, 3), 1 / 3)
    assert torch.allclose(sinkhorn(same, w, w), torch.full((1, 3, 3), 1 / 9))
    cost, a, b = clouds(weighted=True)
    cut = sinkhorn(cost, a, b, regularisation=1e-3, max_iterations=20)
    assert cut.isfinite().all()
    assert torch.allclose(cut.sum(dim=1), b, atol=1e-6), "arrivals are exact, however few iterations"


def test_drawn_targets_follow_the_plan() -> None:
    plan = torch.tensor([[[0.1, 0.3, 0.0], [0.0, 0.0, 0.6]]])
    drawn = torch.stack([drawn_targets(plan)[0] for _ in range(2000)])
    assert set(drawn[:, 0].tolist()) == {0, 1}
    assert (drawn[:, 0] == 1).float().mean() == pytest.approx(0.75, abs=0.04)
    assert (drawn[:, 1] == 2).all()


def test_costs_between_all_clouds() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.rand(3, 6, 2, generator=generator), torch.rand(2, 5, 2, generator=generator)
    a, b = torch.full((3, 6), 1 / 6), torch.full((2, 5), 1 / 5)
    costs = cloud_costs(x, a, y, b, FlatTorus(2), at_once=4, regularisation=1e-3)
    for i, j in ((0, 0), (2, 1)):
        cost = FlatTorus(2).squared_distance(x[i][:, None], y[j][None]).double().numpy()
        assert costs[i, j].item() == pytest.approx(ot.emd2(np.full(6, 1 / 6), np.full(5, 1 / 5), cost), rel=1e-3)
