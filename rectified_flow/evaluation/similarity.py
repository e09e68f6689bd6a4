"""Which pictures are alike, up to mirroring and recompression, by the mean colours of their 8x8 fields.

Colours are those of :func:`rectified_flow.evaluation.features.average_colours`, ``[n, 3 * 8 * 8]``.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

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
