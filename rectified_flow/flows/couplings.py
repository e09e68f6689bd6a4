"""Couplings: the pairing of data and noise in a training batch.

The paths of independent pairs cross. At a crossing, the mean velocity is that of none of the pairs, so learned paths
curve and need more steps. The paths of pairs with a small distance cross less.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

CANDIDATES = 8


def squared_distances(x_0: Tensor, noise: Tensor) -> Tensor:
    """Return the squared distances ``[b, b]`` between all rows of ``x_0`` and of ``noise``, both ``[b, ...]``."""
    return torch.cdist(x_0.flatten(1).float(), noise.flatten(1).float()).square()


def optimal_pairs(costs: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return the permutation that pairs rows with columns at the least sum of costs.

    Over a batch, this is the coupling of Pooladian et al. (2023, arXiv:2304.14772, section 3.2) and Tong et al. (2023,
    arXiv:2302.00482, section 3.4). The call waits for the device, since the assignment is solved on the CPU.

    Args:
        costs: cost ``[b, b]`` of pairing each datum (row) with each noise sample (column).
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
    """Return the nearest noise candidate for each image (Li et al. 2025, arXiv:2505.18521, section 4.2).

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
