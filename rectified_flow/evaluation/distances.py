"""Distances between sets of images: near-duplicates by colours, and distributions by the features of a network.

The colours of an image are the mean colours of its 8x8 fields, ``[n, 3 * 8 * 8]``
(:func:`rectified_flow.evaluation.features.average_colours`). They find copies that were mirrored or recompressed.
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
"""Largest root mean square difference between the fields of near-duplicates: 3 of 256 grey levels."""
HIGHEST_ORDER = 5
"""Highest order of the coefficients in a hash: higher ones are small, and change with recompression."""
AT_ONCE = 2**26
"""Number of distances in memory at once; more if one row alone has more."""


def alike(colours: Tensor, others: Tensor) -> Tensor:
    """Return which pairs of ``colours`` ``[n, d]`` and ``others`` ``[m, d]`` are near-duplicates, bool ``[n, m]``."""
    reach = TOLERANCE * colours.shape[1] ** 0.5
    return (torch.cdist(colours, others) <= reach) | (torch.cdist(colours, mirrored(others)) <= reach)


def near_duplicates(colours: Tensor, others: Tensor) -> Tensor:
    """Return which of ``colours`` ``[n, d]`` have a near-duplicate among ``others`` ``[m, d]``, bool ``[n]``."""
    found = [near.any(dim=1) for _, near in _compared(colours, others)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def count_near_duplicates(colours: Tensor) -> int:
    """Count the images that have a near-duplicate before them."""
    return sum(int(near.tril(first - 1).any(dim=1).sum()) for first, near in _compared(colours, colours))


def _compared(colours: Tensor, others: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row of each block of rows, and which of its pairs are near-duplicates, bool ``[b, m]``."""
    block = max(1, AT_ONCE // max(1, len(others)))
    for first in range(0, len(colours), block):
        yield first, alike(colours[first : first + block], others)


def mirrored(colours: Tensor) -> Tensor:
    """Return the colours of the mirror images."""
    return colours.unflatten(1, (-1, FIELDS, FIELDS)).flip(-1).flatten(1)


def perceptual_hashes(colours: Tensor) -> list[int]:
    """Return a hash of each image that is the same for its mirror image and for nine of ten recompressed copies.

    The hash has 20 bits, one for each coefficient of low frequency in the cosine transform of the grey values. The bit
    is set if the magnitude of the coefficient is above the median. The sign is left out, because mirroring changes
    signs alone, and in a symmetric image signs are noise.
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
"""Bound of the nearness of a copy: half the distance between a training image and the nearest different one."""


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """Compute the squared Fréchet distance of two normal distributions (Heusel et al. 2017, arXiv:1706.08500, eq. 6).

    Args:
        real: features ``[n, d]``.
        generated: features ``[m, d]``.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=_Given(real.shape[1]), sync_on_compute=False)
    return float(_fill(metric, real, generated).compute())


def kernel_distance(real: Tensor, generated: Tensor, seed: int = 0) -> tuple[float, float | None]:
    """Compute the squared maximum mean discrepancy (Binkowski et al. 2018, arXiv:1801.01401, section 3).

    The kernel is cubic. The estimate is unbiased: with few samples it is noisy, but not inflated. It can be negative.

    Returns:
        Mean and standard deviation over random subsets of both sets; the deviation is None if a subset is a whole set.
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
    """Compute fractions in [0, 1] that tell apart the ways in which two distributions differ.

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
    """Compute the relative distance of each of ``queries`` to its nearest row of ``real``, ``[q]``; a copy has 0.

    The unit is the distance from that row to the nearest row that is no near-duplicate of it. (If near-duplicates
    counted, no sample would be a copy of an image that is in the data twice.) So below 1, a query is nearer to a
    training image than different training images are to each other.

    Args:
        queries: features of images ``[q, d]``.
        real: features of training images ``[n, d]``.
        colours: average colours of the training images ``[n, c]``, which find near-duplicates.
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
    """Return the share of ``queries`` that are nearer than :data:`COPY` to a row of ``real``; see :func:`nearness`."""
    return (nearness(queries, real, colours) < COPY).float().mean().item()


def nearest(queries: Tensor, real: Tensor, count: int) -> Tensor:
    """Return the indices ``[q, count]`` of the rows of ``real`` that are nearest to each of ``queries``, nearest first.

    If ``real`` has fewer than ``count`` rows, ``count`` is their number.
    """
    count = min(count, len(real))
    return torch.cat([distances.topk(count, largest=False).indices for _, distances in _distances(queries, real)])


class _Given(nn.Module):
    """A replacement for the feature network of torchmetrics, for features that are already extracted."""

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
    """Return the distances of each row to its fifth and to its first nearest neighbour, the row itself excluded."""
    count = min(NEIGHBOURS, len(features) - 1) + 1
    near = torch.cat([distances.topk(count, largest=False).values for _, distances in _distances(features, features)])
    return near[:, -1], near[:, 1]
