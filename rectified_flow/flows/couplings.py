"""Which noise each image is trained with.

Independent pairs make paths cross, and the mean velocity at a crossing is nobody's: paths curve, and need more steps.
Pairs that lie near each other cross less.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Coupling = Literal["independent", "ot", "immiscible"]

CANDIDATES = 8


def optimal_transport(x_0: Tensor, noise: Tensor, labels: Tensor | None = None) -> Tensor:
    """Pair each image with one noise so that the sum of squared distances is least.

    Over a batch this is the coupling of Pooladian et al. (2023, arXiv:2304.14772, section 3.2) and Tong et al. (2023,
    arXiv:2302.00482, section 3.4). It waits for the device, for the assignment is found on the CPU.

    Args:
        x_0: images ``[b, ...]``.
        noise: ``[b, ...]``.
        labels: int64 ``[b]``; where given, noise changes places within a class only, so that it stays independent of
            the labels (else a class would see one region of the noise in training, and all of it in sampling).

    Returns:
        int64 ``[b]``, a permutation: the row of noise for each image.
    """
    from scipy.optimize import linear_sum_assignment

    order = torch.arange(len(x_0))
    groups = torch.zeros(len(x_0), dtype=torch.long) if labels is None else labels.cpu()
    costs = torch.cdist(x_0.flatten(1).float(), noise.flatten(1).float()).square().cpu()
    for label in groups.unique():
        rows = (groups == label).nonzero().flatten()
        _, columns = linear_sum_assignment(costs[rows[:, None], rows].numpy())
        order[rows] = rows[torch.as_tensor(columns)]
    return order.to(x_0.device)


def nearest_candidate(x_0: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """For each image the nearest of the noises drawn for it alone (Li et al. 2025, arXiv:2505.18521, section 4.2).

    Cheaper than transport, and independent of the rest of the batch; what is left is not quite normal.

    Args:
        x_0: images ``[b, ...]``.
        candidates: noises ``[b, ...]``, of which two at a time are held.

    Returns:
        Noise ``[b, ...]``.
    """
    best, least = x_0, torch.full((len(x_0),), torch.inf, device=x_0.device)
    for noise in candidates:
        distance = (noise - x_0).flatten(1).square().sum(dim=1)
        nearer = (distance < least).reshape(-1, *[1] * (x_0.ndim - 1))
        best, least = torch.where(nearer, noise, best), torch.minimum(distance, least)
    return best
