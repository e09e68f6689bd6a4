"""Distances between sets of images: near-duplicates by colours, and distributions by the features of a network.

The colours of an image are the mean colours of its 8x8 fields, ``[n, 3 * 8 * 8]``
(:func:`rectified_flow.evaluation.features.average_colours`). They find copies that were mirrored or recompressed.

A registered metric takes the features of real data and of generated samples, and returns numbers by name::

    @register(role="metric")
    def mean_distance(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
        return {"mean_distance": float((real.features[0].mean(0) - generated[0].mean(0)).norm())}
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rectified_flow.evaluation.features import GREY_LEVELS, Features
from rectified_flow.registry import register

if TYPE_CHECKING:
    import torchmetrics

M = TypeVar("M", bound="torchmetrics.Metric")

FIELDS = 8
TOLERANCE = 3 / GREY_LEVELS
"""Largest root mean square difference between the fields of near-duplicates: 3 of 256 grey levels."""
HIGHEST_ORDER = 5  # highest order of the coefficients in a hash: higher ones are small, and change with recompression
AT_ONCE = 2**26  # number of distances in memory at once; more if one row alone has more


def alike(colours: Tensor, others: Tensor) -> Tensor:
    """Return which pairs of ``colours`` ``[n, d]`` and ``others`` ``[m, d]`` are near-duplicates, bool ``[n, m]``."""
    reach = TOLERANCE * colours.shape[1] ** 0.5
    return (torch.cdist(colours, others) <= reach) | (torch.cdist(colours, mirrored(others)) <= reach)


def near_duplicates(colours: Tensor, others: Tensor) -> Tensor:
    """Return which of ``colours`` ``[n, d]`` have a near-duplicate among ``others`` ``[m, d]``, bool ``[n]``."""
    found = torch.zeros(len(colours), dtype=torch.bool)
    for rows, near in _by_block(colours, others, alike):
        found[rows] = near.any(dim=1)
    return found


def mirrored(colours: Tensor) -> Tensor:
    """Return the colours of the mirror images."""
    return colours.unflatten(1, (-1, FIELDS, FIELDS)).flip(-1).flatten(1)


def perceptual_hashes(colours: Tensor) -> list[int]:
    """Return a hash of each image that is the same for its mirror image, and for most recompressed copies.

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
COPY = 0.5  # bound of the nearness of a copy: half the distance between a training image and the nearest different one


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """Compute the squared Fréchet distance of two normal distributions (Heusel et al. 2017, arXiv:1706.08500, eq. 6).

    Args:
        real: features ``[n, d]``.
        generated: features ``[m, d]``.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    return float(_filled(FrechetInceptionDistance, real, generated).compute())


def kernel_distance(real: Tensor, generated: Tensor, seed: int = 0) -> tuple[float, float | None]:
    """Compute the squared maximum mean discrepancy (Binkowski et al. 2018, arXiv:1801.01401, section 3).

    The kernel is cubic. The estimate is unbiased: with few samples it is noisy, but not inflated. It can be negative.

    Returns:
        Mean and standard deviation over random subsets of both sets; the deviation is None if a subset is a whole set.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(SUBSET_SIZE, len(real), len(generated))
    exact = torch.autocast("cpu", enabled=False)  # bf16 of sampling would round products of features
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), exact:
        warnings.simplefilter("ignore")  # a warning about keeping all features in memory, where they are anyway
        metric = _filled(KernelInceptionDistance, real, generated, subsets=SUBSETS, subset_size=size)
        torch.manual_seed(seed)
        mean, deviation = metric.compute()
    return float(mean), None if size in (len(real), len(generated)) else float(deviation)


def precision_and_recall(real: Tensor, generated: Tensor) -> dict[str, float]:
    """Compute precision and recall of samples (Kynkaanniemi et al. 2019, arXiv:1904.06991).

    Returns:
        ``precision``: the share of generated images within the reach of a real image: the distance to its fifth
        nearest neighbour in its own set. ``recall``: the share of real images within the reach of a generated image.
    """
    real_reach, generated_reach = _reach(real), _reach(generated)
    precise, recalled = (torch.zeros(len(each), dtype=torch.bool) for each in (generated, real))
    for rows, distances in _by_block(generated, real):
        precise[rows] = (distances <= real_reach).any(dim=1)
        recalled |= (distances <= generated_reach[rows, None]).any(dim=0)
    return {"precision": precise.float().mean().item(), "recall": recalled.float().mean().item()}


def nearness(queries: Sequence[Tensor], real: Sequence[Tensor]) -> Tensor:
    """Compute the relative distance of each of ``queries`` to its nearest training image, ``[q]``; a copy has 0.

    The unit is the distance from that image to the nearest one that is no near-duplicate of it. (If near-duplicates
    counted, no sample would be a copy of an image that is in the data twice.) So below 1, a query is nearer to a
    training image than different training images are to each other. The smaller of two distances counts: by the
    features of a network, which noise changes, and by colours, which find mirrored and noisy copies.

    Args:
        queries: features of images ``[q, d]`` by network; the last are average colours.
        real: features of training images ``[n, d]`` by network.
    """
    colours = real[-1]
    ways = [(queries[0], real[0]), (queries[-1], colours), (mirrored(queries[-1]), colours)]
    return torch.stack([_nearness(ours, theirs, colours) for ours, theirs in ways]).amin(dim=0)


def _nearness(queries: Tensor, real: Tensor, colours: Tensor) -> Tensor:
    """Compute the relative distance by one kind of features, ``[q]``."""
    parts = []
    for _, distances in _by_block(queries, real):
        gap, row = distances.min(dim=1)
        apart = torch.cdist(real[row], real)
        unit = apart.masked_fill(alike(colours[row], colours), torch.inf).min(dim=1).values
        other = apart.topk(min(2, len(real)), largest=False).values[:, -1]
        parts.append(gap / torch.where(unit.isinf(), other, unit).clamp(min=torch.finfo(gap.dtype).tiny))
    return torch.cat(parts)


def share_of_copies(queries: Sequence[Tensor], real: Sequence[Tensor]) -> float:
    """Return the share of ``queries`` that are nearer than :data:`COPY` to a training image; see :func:`nearness`."""
    return (nearness(queries, real) < COPY).float().mean().item()


def nearest(queries: Tensor, real: Tensor, count: int) -> Tensor:
    """Return the indices ``[q, count]`` of the rows of ``real`` that are nearest to each of ``queries``, nearest first.

    If ``real`` has fewer than ``count`` rows, ``count`` is their number.
    """
    count = min(count, len(real))
    return torch.cat([distances.topk(count, largest=False).indices for _, distances in _by_block(queries, real)])


def _filled(metric: type[M], real: Tensor, generated: Tensor, **options: object) -> M:
    """Return a metric of torchmetrics with two sets of features, which are extracted already."""
    network = nn.Identity()
    network.num_features = real.shape[1]  # type: ignore[assignment]  # read by the Fréchet distance
    filled = metric(feature=network, sync_on_compute=False, **options)
    filled.update(real, real=True)
    filled.update(generated, real=False)
    return filled


def _by_block(
    rows: Tensor, others: Tensor, compare: Callable[[Tensor, Tensor], Tensor] = torch.cdist
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of ``rows``, and the comparison of each with ``others``, ``[b, m]``, to bound the memory."""
    block = max(1, AT_ONCE // max(1, len(others)))
    for first in range(0, len(rows), block):
        some = slice(first, first + block)
        yield some, compare(rows[some], others)


def _reach(features: Tensor) -> Tensor:
    """Return the distance of each row to its fifth nearest neighbour, the row itself excluded."""
    count = min(NEIGHBOURS, len(features) - 1) + 1
    blocks = _by_block(features, features)
    return torch.cat([distances.topk(count, largest=False).values[:, -1] for _, distances in blocks])


@dataclass
class RealFeatures:
    """The features of real data, to which generated samples are compared."""

    networks: Sequence[Features]
    """The feature networks. Flows are ranked by the first; the last one is the average colours of 8x8 fields."""
    features: Sequence[Tensor]
    """Features of the training data, ``[n, d]`` by network."""
    held_out: Tensor | None = None
    """Features of held-out data by the first network, ``[m, d]``, if there are any."""
    seed: int = 0
    """Seed of the metrics that draw subsets."""
    seen: Sequence[Tensor] = ()
    """Features of the training data as the flow has seen them: decoded from their latents. Empty if they are equal."""
    unseen: Sequence[Tensor] = ()
    """Features of the held-out data in the same form, by network, if there are any."""

    @property
    def copied(self) -> Sequence[Tensor]:
        """Features of what a flow would generate if it copied its training data, ``[n, d]`` by network."""
        return self.seen or self.features

    @cached_property
    def copies_by_chance(self) -> float | None:
        """The share of copies among the held-out data, none of which is one."""
        return share_of_copies(self.unseen, self.copied) if self.unseen else None


Metric = Callable[[RealFeatures, Sequence[Tensor]], Mapping[str, float]]
"""Numbers by name, from the features of real data and those of generated samples, ``[n, d]`` by network."""


@register(role="metric")
def frechet(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return the Fréchet distance of each feature network; see :func:`frechet_distance`."""
    sets = zip(real.networks, real.features, generated, strict=True)
    return {network.frechet_name: frechet_distance(theirs, ours) for network, theirs, ours in sets}


@register(role="metric")
def kernel(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return the kernel distance of each feature network, and the one to held-out data; see :func:`kernel_distance`."""
    numbers: dict[str, float] = {}
    for network, theirs, ours in zip(real.networks, real.features, generated, strict=True):
        numbers[network.kernel_name], deviation = kernel_distance(theirs, ours, real.seed)
        if deviation is not None:
            numbers[f"{network.kernel_name}_std"] = deviation
    if real.held_out is not None:
        numbers[f"heldout_{real.networks[0].kernel_name}"], _ = kernel_distance(real.held_out, generated[0], real.seed)
    return numbers


@register(role="metric")
def copies(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return the share of copies among the samples, and among held-out data; see :func:`share_of_copies`."""
    by_chance = {} if real.copies_by_chance is None else {"copies_by_chance": real.copies_by_chance}
    return {"copies": share_of_copies(generated, real.copied)} | by_chance


@register(role="metric")
def manifold(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return precision and recall; the work grows with the square of the number of training images."""
    return precision_and_recall(real.features[0], generated[0])
