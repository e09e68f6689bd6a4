"""Clouds of points in memory, checked and padded to one size."""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor
from torch.utils.data import Dataset

from geometry import Geometry
from points import Points
from rectified_flow.condition import Condition
from rectified_flow.errors import UsageError


class PointClouds(Dataset[dict[str, Tensor]]):
    """Clouds of a geometry; items are ``clouds`` ``[n, d]``, ``weights`` ``[n]`` and a condition.

    Points of weight 0 are left out. A cloud with fewer points than the largest is padded by copies of its first point,
    of weight 0.

    Args:
        clouds: points ``[n_i, d]`` of each.
        geometry: of the points.
        weights: of the points ``[n_i]`` of each, not negative; if not given, all count alike.
        conditions: the kind of a condition by its name, and its values ``[len(clouds), ...]``.

    Raises:
        UsageError: if a cloud is empty, its weights are all zero, or a point is none of the geometry; names the cloud.
    """

    def __init__(
        self,
        clouds: Sequence[Tensor],
        geometry: Geometry,
        *,
        weights: Sequence[Tensor] | None = None,
        conditions: dict[str, tuple[Condition, Tensor]] | None = None,
    ) -> None:
        if not clouds:
            raise UsageError("there are no clouds of points")
        weights = weights or [torch.ones(len(cloud)) for cloud in clouds]
        space = Points(geometry)
        for number, (cloud, weight) in enumerate(zip(clouds, weights, strict=True)):
            problem = _problem_with(cloud, weight, space)
            if problem is not None:
                raise UsageError(f"cloud {number}: {problem}")
        present = [(cloud[weight > 0], weight[weight > 0]) for cloud, weight in zip(clouds, weights, strict=True)]
        size = max(len(cloud) for cloud, _ in present)
        self.clouds = torch.stack([torch.cat((c, c[:1].expand(size - len(c), -1))) for c, _ in present]).float()
        self.weights = torch.stack([torch.cat((w, w.new_zeros(size - len(w)))) for _, w in present]).float()
        given = conditions or {}
        self.conditions = {name: kind for name, (kind, _) in given.items()}
        self.values = {name: values for name, (_, values) in given.items()}
        self.description = f"{len(self):,} clouds of up to {size} points"

    @property
    def fingerprint(self) -> str:
        digest = sha256()
        for name, each in self._entries.items():
            digest.update(name.encode() + each.numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.read_batch([index]).items()}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Rows of the items' entries, ``[b, ...]``."""
        rows = torch.as_tensor(indices)
        return {name: values[rows] for name, values in self._entries.items()}

    @property
    def _entries(self) -> dict[str, Tensor]:
        return {"clouds": self.clouds, "weights": self.weights, **self.values}


def _problem_with(cloud: Tensor, weights: Tensor, space: Points) -> str | None:
    if cloud.ndim != 2:
        return f"its shape is {tuple(cloud.shape)}; pass points as [n, d]"
    if len(cloud) == 0:
        return "it has no points: leave it out"
    if weights.shape != cloud.shape[:1]:
        return f"{len(weights)} weights for {len(cloud)} points"
    if not (weights.isfinite().all() and (weights >= 0).all()):
        return "a weight is negative or not finite"
    if not weights.any():
        return "all of its weights are zero: leave it out"
    return space.problem_with(cloud[weights > 0])
