"""Which pictures are alike, up to mirroring and recompression, by the mean colours of their 8x8 fields.

Colours are those of :func:`rectified_flow.evaluation.features.average_colours`, ``[n, 3 * 8 * 8]``.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectified_flow.evaluation.features import GREY_LEVELS

FIELDS = 8
TOLERANCE = 3 / GREY_LEVELS
"""Root mean square difference between the fields of near-duplicates, at most: 3 of 256 grey levels."""
HIGHEST_ORDER = 5
"""Of the coefficients in a hash: higher ones are small, and change with recompression."""
AT_ONCE = 2**26
"""Distances in memory at once, at most, if one row has no more."""


def alike(colours: Tensor, others: Tensor) -> Tensor:
    """Which of ``colours`` ``[n, d]`` and ``others`` ``[m, d]`` are near-duplicates, bool ``[n, m]``."""
    reach = TOLERANCE * colours.shape[1] ** 0.5
    return (torch.cdist(colours, others) <= reach) | (torch.cdist(colours, mirrored(others)) <= reach)


def near_duplicates(colours: Tensor, others: Tensor) -> Tensor:
    """Which of ``colours`` ``[n, d]`` have a near-duplicate among ``others`` ``[m, d]``, bool ``[n]``."""
    found = [near.any(dim=1) for _, near in _compared(colours, others)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def count_near_duplicates(colours: Tensor) -> int:
    """How many pictures have a near-duplicate before them."""
    return sum(int(near.tril(first - 1).any(dim=1).sum()) for first, near in _compared(colours, colours))


def _compared(colours: Tensor, others: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The number of the first row of each block, and which pairs are near-duplicates, bool ``[b, m]``."""
    block = max(1, AT_ONCE // max(1, len(others)))
    for first in range(0, len(colours), block):
        yield first, alike(colours[first : first + block], others)


def mirrored(colours: Tensor) -> Tensor:
    """The colours of the mirror images."""
    return colours.unflatten(1, (-1, FIELDS, FIELDS)).flip(-1).flatten(1)


def perceptual_hashes(colours: Tensor) -> list[int]:
    """A hash of each picture, which its mirror image has too, and nine of ten recompressed copies.

    Each of 20 bits says whether a coefficient of low frequency of the grey values' cosine transform is larger than the
    median, whatever its sign: mirroring changes signs alone, and in a symmetric picture signs are noise.
    """
    grey = colours.double().unflatten(1, (-1, FIELDS, FIELDS)).mean(dim=1)
    frequency = torch.arange(FIELDS)
    basis = torch.cos(torch.pi / FIELDS * frequency[:, None] * (frequency + 0.5)).double()
    basis[0] /= 2**0.5
    order = frequency[:, None] + frequency
    sizes = (basis @ grey @ basis.T)[:, (order > 0) & (order <= HIGHEST_ORDER)].abs()
    larger = sizes > sizes.median(dim=1, keepdim=True).values
    return [int(value) for value in larger.numpy() @ (1 << np.arange(sizes.shape[1], dtype=np.int64))]


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
