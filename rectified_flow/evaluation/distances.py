"""Distances between two sets of features ``[n, d]``, by torchmetrics and by nearest neighbours."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow.evaluation.similarity import AT_ONCE, alike

SUBSETS, SUBSET_SIZE = 100, 1000
NEIGHBOURS = 5
COPY = 0.5
"""Nearness of a copy: half as far from a training picture as the nearest training picture that differs from it."""


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """The squared Fréchet distance between two normal distributions (Heusel et al. 2017, arXiv:1706.08500, eq. 6)."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=_Given(real.shape[1]), sync_on_compute=False)
    return float(_fill(metric, real, generated).compute())


def kernel_distance(real: Tensor, generated: Tensor, seed: int = 0) -> tuple[float, float | None]:
    """The squared maximum mean discrepancy under a cubic kernel (Binkowski et al. 2018, arXiv:1801.01401, section 3).

    The estimate is unbiased: with few samples it is noisy, but not inflated. It can be negative.

    Returns:
        Mean and standard deviation over random subsets of both sets; no deviation where a subset is a whole set.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(SUBSET_SIZE, len(real), len(generated))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about keeping all features in memory, where they are anyway
        metric = KernelInceptionDistance(
            feature=_Given(real.shape[1]), subsets=SUBSETS, subset_size=size, sync_on_compute=False
        )
        torch.manual_seed(seed)
        mean, deviation = _fill(metric, real, generated).compute()
    return float(mean), None if size in (len(real), len(generated)) else float(deviation)


def manifold_scores(real: Tensor, generated: Tensor) -> dict[str, float]:
    """Fractions in [0, 1] that describe what a distance hides.

    The reach of an image is the distance to its fifth nearest neighbour in its own set.

    Returns:
        ``precision``: generated images within the reach of a real image. ``recall``: real images within the reach of a
        generated image (Kynkaanniemi et al. 2019, arXiv:1904.06991). ``coverage``: real images with a generated image
        within their own reach (Naeem et al. 2020, arXiv:2002.09797). ``authenticity``: generated images that are
        farther from the nearest real image than that image is from its nearest real neighbour (Alaa et al. 2022,
        arXiv:2102.08921); low where training images were memorised.
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


def nearness(queries: Tensor, real: Tensor, colours: Tensor) -> Tensor:
    """How far each of ``queries`` is from its nearest row of ``real``, ``[q]``; a copy is at 0.

    The unit is the distance from that row to the nearest row that is no near-duplicate of it, if there is one: else no
    sample would be a copy of a picture that is there twice. So below 1, a query is nearer to a training picture than
    different training pictures are to each other.

    Args:
        queries: features of pictures ``[q, d]``.
        real: features of training pictures ``[n, d]``.
        colours: their average colours ``[n, c]``, which say what is a near-duplicate.
    """
    parts = []
    for _, distances in _distances(queries, real):
        gap, row = distances.min(dim=1)
        apart = torch.cdist(real[row], real)
        unit = apart.masked_fill(alike(colours[row], colours), torch.inf).min(dim=1).values
        other = apart.topk(min(2, len(real)), largest=False).values[:, -1]
        parts.append(gap / torch.where(unit.isinf(), other, unit).clamp(min=torch.finfo(gap.dtype).tiny))
    return torch.cat(parts)


def share_of_copies(queries: Tensor, real: Tensor, colours: Tensor) -> float:
    """The share of ``queries`` that are nearer than :data:`COPY` to a row of ``real``, see :func:`nearness`."""
    return (nearness(queries, real, colours) < COPY).float().mean().item()


def nearest(queries: Tensor, real: Tensor, count: int) -> Tensor:
    """Indices ``[q, count]`` of the rows of ``real`` that are nearest to each of ``queries``, nearest first.

    If ``real`` has fewer than ``count`` rows, ``count`` is their number.
    """
    count = min(count, len(real))
    return torch.cat([distances.topk(count, largest=False).indices for _, distances in _distances(queries, real)])


class _Given(nn.Module):
    """Replaces the feature network of torchmetrics, for features that are already extracted."""

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
    block = max(1, AT_ONCE // len(others))
    for start in range(0, len(queries), block):
        rows = slice(start, start + block)
        yield rows, torch.cdist(queries[rows], others)


def _reach(features: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the distances to its fifth and to its first nearest neighbour, the row itself excluded."""
    count = min(NEIGHBOURS, len(features) - 1) + 1
    near = torch.cat([distances.topk(count, largest=False).values for _, distances in _distances(features, features)])
    return near[:, -1], near[:, 1]
