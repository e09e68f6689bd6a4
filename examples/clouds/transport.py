"""Entropic optimal transport between clouds of points, solved by POT (Python Optimal Transport)."""

from functools import partial

import torch
from ot.batch import solve_batch
from torch import Tensor

from geometry import Geometry
from point_clouds import draw_by_point
from rectified_flow import randomness

REGULARISATION = 0.002
"""Regularisation as a multiple of the mean cost. With 0.02, a quarter of 40 points of noise is the target of no point
of the cloud, and is missed where sampling starts; with 0.002, 8%."""
ITERATIONS, ANNEALING = 10, 0.25
"""Iterations at each regularisation, and factor to the next one."""
PAIR_REGULARISATION, PAIRS_AT_ONCE = 0.1, 1024
"""Regularisation of the costs between whole clouds, and number of pairs of clouds in memory at once."""
TINY = 1e-30


@torch.no_grad()
def plans(cost: Tensor, a: Tensor, b: Tensor, regularisation: float = REGULARISATION, *, first: float = 1.0) -> Tensor:
    """Return the plans of many problems of entropic optimal transport (Cuturi 2013, arXiv:1306.0895).

    All problems are solved in the same calls of ``ot.batch.solve_batch``. The regularisation falls in steps, and the
    potentials of a step are subtracted from the costs of the next one (Schmitzer 2016, arXiv:1610.06519): at once, a
    regularisation of 0.002 would need hundreds of iterations. The number of iterations is fixed, since POT's test of
    convergence is one for all problems: a plan would depend on the rest of the batch, which differs between numbers of
    processes.

    Args:
        cost: float32 ``[k, n, m]``, not negative.
        a: weights of the sources ``[k, n]`` with sum 1 in each row. A source of weight 0 is absent.
        b: weights of the targets ``[k, m]``, likewise.
        regularisation: multiple of the mean cost of the independent coupling.
        first: the multiple to start from.

    Returns:
        Plans, float32 ``[k, n, m]``. Their column sums are ``b``; their row sums differ from ``a`` by a few percent.
    """
    present = (a[:, :, None] > 0) & (b[:, None] > 0)
    mean = torch.einsum("kn,knm,km->k", a, cost.masked_fill(~present, 0), b).clamp(min=TINY)
    cost, current = (cost / mean[:, None, None]).masked_fill(~present, 0), first
    while True:
        with cost.device:  # POT 0.9.7 makes its first potentials on the default device
            solved = solve_batch(
                cost, max(current, regularisation), a, b, max_iter=ITERATIONS, tol=0, method="sinkhorn", grad="detach"
            )
        if current <= regularisation:
            plan: Tensor = solved.plan
            return plan
        u, v = (each.clamp(min=TINY).log() for each in solved.potentials)
        cost = (cost - current * (u[:, :, None] + v[:, None])).masked_fill(~present, 0)
        current *= ANNEALING


def barycentric(plan: Tensor, x: Tensor, y: Tensor, geometry: Geometry) -> Tensor:
    """Return the mean target of each source, in the tangent space of the source: the barycentric projection.

    Args:
        plan: ``[k, n, m]``.
        x: sources ``[k, n, d]``.
        y: targets ``[k, m, d]``.
        geometry: geometry of the points.

    Returns:
        Points ``[k, n, d]``; a source of weight 0 stays where it is.
    """
    shares = plan / plan.sum(dim=2, keepdim=True).clamp(min=TINY)
    return geometry.exp(x, (shares[..., None] * geometry.log(x[:, :, None], y[:, None])).sum(dim=2))


def drawn_targets(plan: Tensor) -> Tensor:
    """Draw a target of each source, int64 ``[k, n]``, with the probabilities of a plan ``[k, n, m]``."""
    ways = plan.cumsum(dim=2)
    chance = draw_by_point(partial(randomness.rand, device=plan.device), "plan", plan.shape[:2])
    targets = torch.searchsorted(ways, chance[..., None] * ways[..., -1:], right=True).squeeze(2)
    return targets.clamp(max=plan.shape[2] - 1)


def cloud_costs(x: Tensor, a: Tensor, y: Tensor, b: Tensor, geometry: Geometry) -> Tensor:
    """Return the mean squared distance ``[k]`` that points travel from a cloud to another one, for many pairs.

    The regularisation is large, and few iterations suffice, since these costs are only compared with each other.

    Args:
        x: clouds ``[k, n, d]``.
        a: weights of their points ``[k, n]``, as in :func:`plans`.
        y: clouds ``[k, m, d]``.
        b: weights of their points ``[k, m]``.
        geometry: geometry of the points.
    """
    costs = []
    for some in torch.arange(len(x), device=x.device).split(PAIRS_AT_ONCE):
        cost = geometry.squared_distance(x[some][:, :, None], y[some][:, None])
        plan = plans(cost, a[some], b[some], PAIR_REGULARISATION, first=PAIR_REGULARISATION)
        costs.append((plan * cost).sum(dim=(1, 2)))
    return torch.cat(costs)
