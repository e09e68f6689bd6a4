"""Transport: which noise each datum is trained with, and which point of a noise cloud each point of a cloud.

The paths of independent pairs cross. At a crossing, the mean velocity is that of none of the pairs, so learned paths
curve and need more steps. The paths of pairs with a small distance cross less.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.spaces.geometry import Geometry

CANDIDATES = 8

_SCALINGS = 10
"""Scalings between two evaluations of the kernel, which cost as much as several of them."""
_TINY = 1e-30


def squared_distances(x_0: Tensor, noise: Tensor) -> Tensor:
    """Between all rows of ``x_0`` and of ``noise``, both ``[b, ...]``: ``[b, b]``."""
    return torch.cdist(x_0.flatten(1).float(), noise.flatten(1).float()).square()


def optimal_pairs(costs: Tensor, groups: Tensor | None = None) -> Tensor:
    """The permutation that pairs rows with columns at the least sum of costs.

    Over a batch, this is the coupling of Pooladian et al. (2023, arXiv:2304.14772, section 3.2) and Tong et al. (2023,
    arXiv:2302.00482, section 3.4). The call waits for the device, since the assignment is solved on the CPU.

    Args:
        costs: ``[b, b]``, of each datum (row) with each noise sample (column).
        groups: int64 ``[b]``, equal for rows with equal conditions. If given, noise is permuted only within each group,
            so that it stays independent of the conditions. (Otherwise a class would be trained on one region of the
            noise but sampled from all of it.)

    Returns:
        int64 ``[b]``, a permutation: the noise of each datum.
    """
    from scipy.optimize import linear_sum_assignment

    order = torch.arange(len(costs))
    groups = torch.zeros(len(costs), dtype=torch.long) if groups is None else groups.cpu()
    on_cpu = costs.cpu()
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        _, columns = linear_sum_assignment(on_cpu[rows[:, None], rows].numpy())
        order[rows] = rows[torch.as_tensor(columns)]
    return order.to(costs.device)


def nearest_candidate(x_0: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """For each image, the nearest of the noise candidates drawn for it (Li et al. 2025, arXiv:2505.18521, section 4.2).

    This is cheaper than optimal transport and independent of the rest of the batch. The selected noise is not exactly
    normal.

    Args:
        x_0: images ``[b, ...]``.
        candidates: noise samples ``[b, ...]``; two at a time are in memory.

    Returns:
        Noise ``[b, ...]``.
    """
    best, least = x_0, torch.full((len(x_0),), torch.inf, device=x_0.device)
    for noise in candidates:
        distance = (noise - x_0).flatten(1).square().sum(dim=1)
        nearer = (distance < least).reshape(-1, *[1] * (x_0.ndim - 1))
        best, least = torch.where(nearer, noise, best), torch.minimum(distance, least)
    return best


@torch.no_grad()
def sinkhorn(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    regularisation: float = 0.01,
    tolerance: float = 1e-4,
    max_iterations: int = 10_000,
) -> Tensor:
    """Plans of entropic optimal transport (Cuturi 2013, arXiv:1306.0895), many at once.

    Scalings are absorbed into potentials, and the regularisation falls to its value step by step (Schmitzer 2016,
    arXiv:1610.06519), so float32 is enough for one of 1e-3. Each plan is a function of its own row,
    whatever else is in the batch.

    Args:
        cost: float32 ``[k, n, m]``, not negative.
        a: weights of the sources ``[k, n]``; each row sums to 1, and a source of weight 0 is absent.
        b: weights of the targets ``[k, m]``, likewise.
        regularisation: of each plan, as a multiple of the mean cost of its independent coupling.
        tolerance: the greatest sum over sources of errors of the weight that leaves them.
        max_iterations: after which a plan is taken as it is.

    Returns:
        Float32 ``[k, n, m]``. The weights that arrive are exact.
    """
    cost = cost.where((a[:, :, None] > 0) & (b[:, None] > 0), 0)
    least = _column(regularisation * torch.einsum("kn,knm,km->k", a, cost, b)).clamp(min=_TINY)
    greatest = torch.maximum(_column(cost.flatten(1).amax(dim=1)), least)
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    plan, done = torch.zeros_like(cost), torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    blocks = -(-max_iterations // _SCALINGS)
    for block in range(blocks):
        epsilon = torch.maximum(greatest * 0.25**block, least)
        kernel = ((f[:, :, None] + g[:, None] - cost) / epsilon).exp()
        u, v = torch.ones_like(a), torch.ones_like(b)
        for _ in range(_SCALINGS):
            u = a / _times(kernel, v).clamp(min=_TINY)
            v = b / _times(kernel.mT, u).clamp(min=_TINY)
        error = (u * _times(kernel, v) - a).abs().sum(dim=1)
        ready = ((epsilon <= least).flatten() & (error <= tolerance) | (block == blocks - 1)) & ~done
        plan[ready] = u[ready, :, None] * kernel[ready] * v[ready, None]
        done |= ready
        if done.all():
            break
        f, g = f + epsilon[:, 0] * u.log(), g + epsilon[:, 0] * v.log()
    return plan


def barycentric(plan: Tensor, x: Tensor, y: Tensor, geometry: Geometry) -> Tensor:
    """Where a plan sends each point on average: the barycentric projection, seen from the point's tangent space.

    Args:
        plan: ``[k, n, m]``.
        x: sources ``[k, n, d]``.
        y: targets ``[k, m, d]``.
        geometry: of the points.

    Returns:
        Points ``[k, n, d]``; a source of weight 0 stays where it is.
    """
    shares = plan / plan.sum(dim=2, keepdim=True).clamp(min=_TINY)
    return geometry.exp(x, (shares[..., None] * geometry.log(x[:, :, None], y[:, None])).sum(dim=2))


def drawn_targets(plan: Tensor) -> Tensor:
    """A target of each source, int64 ``[k, n]``, drawn with the probabilities of a plan ``[k, n, m]``."""
    ways = plan.cumsum(dim=2)
    chance = randomness.rand("plan", plan.shape[:2], plan.device)[..., None] * ways[..., -1:]
    return torch.searchsorted(ways, chance, right=True).squeeze(2).clamp(max=plan.shape[2] - 1)


def cloud_costs(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, geometry: Geometry, *, at_once: int = 256, **settings: Any
) -> Tensor:
    """The mean squared distance that the points of each cloud travel to become those of each other, ``[k, l]``.

    Args:
        x: clouds ``[k, n, d]``.
        a: weights of their points ``[k, n]``, as of :func:`sinkhorn`.
        y: clouds ``[l, m, d]``.
        b: weights of their points ``[l, m]``.
        geometry: of the points.
        at_once: pairs in memory together.
        settings: of :func:`sinkhorn`.
    """
    pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(y))).to(x.device)
    costs = []
    for i, j in (part.unbind(dim=1) for part in pairs.split(at_once)):
        cost = geometry.squared_distance(x[i][:, :, None], y[j][:, None])
        plan = sinkhorn(cost, a[i], b[j], **settings)
        costs.append((plan * cost).sum(dim=(1, 2)))
    return torch.cat(costs).reshape(len(x), len(y))


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]


def _times(kernel: Tensor, v: Tensor) -> Tensor:
    return (kernel @ v[..., None]).squeeze(-1)
