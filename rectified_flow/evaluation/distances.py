"""How far two sets of features ``[n, d]`` are apart, by torchmetrics and by nearest neighbours."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SUBSETS, SUBSET_SIZE = 100, 1000
NEIGHBOURS = 5
BLOCK = 1024
"""Rows whose distances to all others are held at once."""


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """The squared Fréchet distance of two normal distributions (Heusel et al. 2017, arXiv:1706.08500, eq. 6)."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=_Given(real.shape[1]), sync_on_compute=False)
    return float(_fill(metric, real, generated).compute())


def kernel_distance(real: Tensor, generated: Tensor, seed: int = 0) -> tuple[float, float]:
    """The squared maximum mean discrepancy under a cubic kernel (Binkowski et al. 2018, arXiv:1801.01401, section 3).

    Unbiased, so that few samples make it noisy and not larger; it can come out below 0.

    Returns:
        Mean and standard deviation over random subsets of both sets.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(SUBSET_SIZE, len(real), len(generated))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of keeping all features, which is done anyway
        metric = KernelInceptionDistance(
            feature=_Given(real.shape[1]), subsets=SUBSETS, subset_size=size, sync_on_compute=False
        )
        torch.manual_seed(seed)
        mean, deviation = _fill(metric, real, generated).compute()
    return float(mean), float(deviation)


def manifold_scores(real: Tensor, generated: Tensor) -> dict[str, float]:
    """Shares in [0, 1] that say what a distance hides.

    Each picture's reach is the distance to its fifth neighbour of its own kind.

    Returns:
        ``precision``: generated pictures within reach of a real one; ``recall``: real ones within reach of a generated
        one (Kynkaanniemi et al. 2019, arXiv:1904.06991); ``coverage``: real ones with a generated one within their own
        reach (Naeem et al. 2020, arXiv:2002.09797); ``authenticity``: generated ones farther from the nearest real one
        than that is from its nearest real neighbour (Alaa et al. 2022, arXiv:2102.08921), low where training pictures
        were memorised.
    """
    real_reach, real_gap = _reach(real)
    generated_reach, _ = _reach(generated)
    precise, authentic, covered = [], [], torch.zeros(len(real), dtype=torch.bool)
    recalled = torch.zeros(len(real), dtype=torch.bool)
    for rows, distances in _distances(generated, real):
        precise.append((distances <= real_reach).any(dim=1))
        gap, nearest = distances.min(dim=1)
        authentic.append(gap > real_gap[nearest])
        covered |= (distances <= real_reach).any(dim=0)
        recalled |= (distances <= generated_reach[rows, None]).any(dim=0)
    shares = {"precision": torch.cat(precise), "recall": recalled, "coverage": covered}
    shares["authenticity"] = torch.cat(authentic)
    return {name: share.float().mean().item() for name, share in shares.items()}


def nearest(queries: Tensor, real: Tensor, count: int) -> Tensor:
    """Numbers ``[q, count]`` of the nearest of ``real`` to each of ``queries``, nearest first; or of all there are."""
    count = min(count, len(real))
    return torch.cat([distances.topk(count, largest=False).indices for _, distances in _distances(queries, real)])


class _Given(nn.Module):
    """Stands where torchmetrics wants a network, for features that were extracted before."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def _fill(metric: Any, real: Tensor, generated: Tensor) -> Any:
    metric.update(real, real=True)
    metric.update(generated, real=False)
    return metric


def _distances(queries: Tensor, others: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(queries), BLOCK):
        rows = slice(start, start + BLOCK)
        yield rows, torch.cdist(queries[rows], others)


def _reach(features: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the distances to its fifth neighbour and to its first, itself left out."""
    count = min(NEIGHBOURS, len(features) - 1) + 1
    near = torch.cat([distances.topk(count, largest=False).values for _, distances in _distances(features, features)])
    return near[:, -1], near[:, 1]
