"""A metric of one's own: the distance between the means of features."""

from collections.abc import Sequence

from torch import Tensor

from rectified_flow import register
from rectified_flow.evaluation.distances import RealFeatures


@register(role="metric")
def mean_gap(real: RealFeatures, generated: Sequence[Tensor]) -> dict[str, float]:
    """Return the distance between the means of the features ``[n, d]`` of the first network."""
    return {"mean_gap": float((real.features[0].mean(dim=0) - generated[0].mean(dim=0)).norm())}
