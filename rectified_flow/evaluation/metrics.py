"""Metrics by name: functions that compare the features of generated samples with those of real data.

A metric takes the features of real data and of generated samples, and returns numbers by name::

    @register(role="metric")
    def mean_distance(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
        return {"mean_distance": float((real.features[0].mean(0) - generated[0].mean(0)).norm())}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from rectified_flow.evaluation.distances import frechet_distance, kernel_distance, manifold_scores, share_of_copies
from rectified_flow.evaluation.features import Features
from rectified_flow.registry import register


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

    @cached_property
    def copies_by_chance(self) -> float | None:
        """The share of copies among the held-out data, none of which is one."""
        return None if self.held_out is None else share_of_copies(self.held_out, self.features[0], self.features[-1])


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
    return {"copies": share_of_copies(generated[0], real.features[0], real.features[-1])} | by_chance


@register(role="metric")
def manifold(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return precision, recall, coverage and authenticity; see :func:`manifold_scores`.

    The work grows with the square of the number of training images.
    """
    return manifold_scores(real.features[0], generated[0])
