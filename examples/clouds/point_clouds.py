"""Clouds of points: a dataset in memory, and the space of a flow on them."""

from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from geometry import Geometry, Sphere
from rectified_flow import Labels, Space, UsageError, register

PICTURE_SIDE, DOT = 96, 5
"""Side of a picture, and side of the square that a point covers [px]."""
TOLERANCE = 1e-3
"""Distance from the geometry up to which a point is projected without an error."""


class PointClouds(Dataset[dict[str, Tensor]]):
    """Labelled clouds, padded to one size; items are ``clouds`` ``[n, d]``, ``weights`` ``[n]`` and ``labels``.

    The points of a cloud have weight 1. The padding is copies of the first point, of weight 0.

    Args:
        clouds: points ``[n_i, d]`` of each cloud.
        labels: int64 ``[len(clouds)]``.
        geometry: the geometry of the points.
        classes: number of different labels.
        size: points of a padded cloud; those of the largest cloud if not given.

    Raises:
        UsageError: if a cloud is empty or has a point outside of the geometry; the sentence names the cloud.
    """

    def __init__(
        self, clouds: Sequence[Tensor], labels: Tensor, geometry: Geometry, *, classes: int, size: int | None = None
    ) -> None:
        for number, cloud in enumerate(clouds):
            problem = Points(geometry).problem_with(cloud)
            if problem is not None:
                raise UsageError(f"cloud {number}: {problem}")
        places = torch.arange(size or max(map(len, clouds)))
        present = [places < len(cloud) for cloud in clouds]
        self.entries = {
            "clouds": torch.stack(
                [cloud[places * there] for cloud, there in zip(clouds, present, strict=True)]
            ).float(),
            "weights": torch.stack(present).float(),
            "labels": labels,
        }
        self.conditions = {"labels": Labels(classes)}
        self.description = f"{len(self):,} clouds of up to {len(places)} points"

    @property
    def fingerprint(self) -> str:
        """Hash of all entries."""
        digest = sha256()
        for name, values in self.entries.items():
            digest.update(name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.entries["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.entries.items()}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the entries of some items, ``[b, ...]``."""
        return {name: values[torch.as_tensor(indices)] for name, values in self.entries.items()}


@register
class Points(Space):
    """Clouds ``[b, n, d]`` of points of a geometry. Their weights are an entry of the batch of their own.

    Args:
        geometry: the geometry of the points.
        shape: ``(n, d)``; that of the first training batch if not given.
    """

    key = "clouds"

    def __init__(self, geometry: Geometry, shape: Sequence[int] | None = None) -> None:
        self.geometry = geometry
        self.shape = None if shape is None else tuple(shape)

    def encode(self, data: Tensor) -> Tensor:
        """Project stored points onto the geometry, float32."""
        return self.geometry.project(data.float())

    def decode(self, x: Tensor) -> Tensor:
        """Return points of the geometry, float32."""
        return self.geometry.project(x.float())

    def render(self, data: Tensor) -> Tensor:
        """Draw white points on black; those on the far side of a sphere, as its last axis shows it, are grey."""
        low, high = self.geometry.window
        places = (data[..., :2] - low) / (high - low) * PICTURE_SIDE
        columns, rows = places.long().clamp(0, PICTURE_SIDE - 1).unbind(dim=-1)
        far = (data[..., -1] < 0) & isinstance(self.geometry, Sphere)
        shades = torch.where(far, 90.0, 255.0)
        pictures = torch.zeros(len(data), PICTURE_SIDE**2, device=data.device)
        pictures.scatter_reduce_(1, (PICTURE_SIDE - 1 - rows) * PICTURE_SIDE + columns, shades, "amax")
        dots = F.max_pool2d(pictures.reshape(-1, 1, PICTURE_SIDE, PICTURE_SIDE), DOT, stride=1, padding=DOT // 2)
        return dots.to(torch.uint8).expand(-1, 3, -1, -1)

    def problem_with(self, data: Tensor) -> str | None:
        """Describe what is wrong with clouds ``[..., n, d]``, or return None."""
        if data.ndim < 2 or data.shape[-2] == 0 or data.shape[-1] != self.geometry.dim:
            return f"its shape is {tuple(data.shape)}; {self.geometry} needs points [n, {self.geometry.dim}]"
        off = (data - self.geometry.project(data)).abs().amax()
        if off <= TOLERANCE:
            return None
        return (
            f"points are up to {off:.3g} off the {self.geometry}: project them"
            if off.isfinite()
            else "points are not finite"
        )

    @property
    def noun(self) -> str:
        """The size of a cloud in words."""
        return f"{self.shape[0]} points" if self.shape else "clouds"
