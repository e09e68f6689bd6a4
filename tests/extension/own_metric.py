"""Metrics of one's own: the distance between the means of features, and a score that asks the flow itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rectified_flow import register
from rectified_flow.distributed import map_over_ranks
from rectified_flow.evaluation.distances import RealFeatures
from rectified_flow.evaluation.evaluator import Comparison


@register(role="metric")
def mean_gap(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return the distance between the means of the features ``[n, d]`` of the first network."""
    return {"mean_gap": float((real.features[0].mean(dim=0) - generated[0].mean(dim=0)).norm())}


@register(role="score")
def brightness(comparison: Comparison) -> dict[str, float]:
    """Return the mean brightness of four samples, of which every process generates a share."""

    def sample(numbers: list[int]) -> Tensor:
        batches = comparison.evaluator.sampled(comparison.flow, numbers, **comparison.options)
        return torch.cat([pictures.float().flatten(1).mean(dim=1).cpu() for pictures in batches])

    return {"brightness": float(map_over_ranks(comparison.evaluator.state, 4, sample).mean())}
