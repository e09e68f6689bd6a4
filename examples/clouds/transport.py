"""Entropic optimal transport between clouds of points."""

from typing import Any

import torch
from torch import Tensor

from geometry import Geometry
from rectified_flow import randomness

_SCALINGS = 10
"""Scalings between two evaluations of the kernel, which cost as much as several scalings."""
_TINY = 1e-30


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
    """Compute many plans of entropic optimal transport at once (Cuturi 2013, arXiv:1306.0895).

    Scalings are absorbed into potentials, and the regularisation is annealed (Schmitzer 2016, arXiv:1610.06519), so
    that float32 suffices for a regularisation of 1e-3. Each plan depends on its own row alone.

    Args:
        cost: float32 ``[k, n, m]``, not negative.
        a: weights of the sources ``[k, n]`` with sum 1 in each row. A source of weight 0 is absent.
        b: weights of the targets ``[k, m]``, likewise.
        regularisation: multiple of the mean cost of the independent coupling.
        tolerance: largest accepted error of the weights that leave the sources, summed over the sources.
        max_iterations: number of scalings after which a plan is returned as it is.

    Returns:
        Plans, float32 ``[k, n, m]``. Their column sums are ``b`` exactly.
    """
    cost = cost.where((a[:, :, None] > 0) & (b[:, None] > 0), 0)
    least = (regularisation * torch.einsum("kn,knm,km->k", a, cost, b)).clamp(min=_TINY)[:, None]
    greatest = torch.maximum(cost.flatten(1).amax(dim=1, keepdim=True), least)
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    plan, done = torch.zeros_like(cost), torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    blocks = -(-max_iterations // _SCALINGS)
    for block in range(blocks):
        epsilon = torch.maximum(greatest * 0.25**block, least)
        kernel = ((f[:, :, None] + g[:, None] - cost) / epsilon[:, None]).exp()
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
        f, g = f + epsilon * u.log(), g + epsilon * v.log()
    return plan


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
    shares = plan / plan.sum(dim=2, keepdim=True).clamp(min=_TINY)
    return geometry.exp(x, (shares[..., None] * geometry.log(x[:, :, None], y[:, None])).sum(dim=2))


def drawn_targets(plan: Tensor) -> Tensor:
    """Draw a target of each source, int64 ``[k, n]``, with the probabilities of a plan ``[k, n, m]``."""
    ways = plan.cumsum(dim=2)
    chance = randomness.rand("plan", plan.shape[:2], plan.device)[..., None] * ways[..., -1:]
    return torch.searchsorted(ways, chance, right=True).squeeze(2).clamp(max=plan.shape[2] - 1)


def cloud_costs(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, geometry: Geometry, *, at_once: int = 256, **settings: Any
) -> Tensor:
    """Return the mean squared distance that points travel from each cloud to each other cloud, ``[k, l]``.

    Args:
        x: clouds ``[k, n, d]``.
        a: weights of their points ``[k, n]``, as in :func:`sinkhorn`.
        y: clouds ``[l, m, d]``.
        b: weights of their points ``[l, m]``.
        geometry: geometry of the points.
        at_once: number of pairs in memory at once.
        settings: settings of :func:`sinkhorn`.
    """
    pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(y))).to(x.device)
    costs = []
    for i, j in (part.unbind(dim=1) for part in pairs.split(at_once)):
        cost = geometry.squared_distance(x[i][:, :, None], y[j][:, None])
        costs.append((sinkhorn(cost, a[i], b[j], **settings) * cost).sum(dim=(1, 2)))
    return torch.cat(costs).reshape(len(x), len(y))


def _times(kernel: Tensor, v: Tensor) -> Tensor:
    return (kernel @ v[..., None]).squeeze(-1)
