"""Clouds of points: a dataset in memory, the space of a flow on them, and the treatment of padding."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from geometry import Geometry, Sphere
from rectified_flow import Medium, Space, UsageError, register
from rectified_flow.condition import ConditionSpecs

PICTURE_SIDE, DOT = 96, 5
"""Side of a picture, and side of the square that a point covers [px]."""
FRONT, BACK = 255.0, 90.0
"""Grey values of points, and of those on the far side of a sphere."""
TOLERANCE = 1e-3
"""Distance from the geometry up to which a point is projected without an error."""
BLOCK = 64
"""Number of points that get their random numbers in one draw."""


class PointClouds(Dataset[dict[str, Tensor]]):
    """Clouds of different sizes, padded to one size, with weights and conditions.

    Items are ``clouds`` ``[n, d]``, ``weights`` ``[n]`` and the conditions by name. The padding is copies of the first
    point, of weight 0.

    Args:
        clouds: points ``[n_i, d]`` of each cloud.
        geometry: the geometry of the points.
        conditions: values of the conditions by name, ``[len(clouds), ...]``, with "none" where a value is missing.
        kinds: kinds of the conditions by name.
        weights: weights ``[n_i]`` of the points of each cloud, of any sum; 1 if not given.
        size: points of a padded cloud; those of the largest cloud if not given.

    Raises:
        UsageError: if a cloud is empty, has a point outside of the geometry, or has no weight; the sentence names the
            number of the cloud.
    """

    def __init__(
        self,
        clouds: Sequence[Tensor],
        geometry: Geometry,
        *,
        conditions: Mapping[str, Tensor] | None = None,
        kinds: ConditionSpecs | None = None,
        weights: Sequence[Tensor] | None = None,
        size: int | None = None,
    ) -> None:
        weights = [cloud.new_ones(len(cloud)) for cloud in clouds] if weights is None else weights
        for number, (cloud, masses) in enumerate(zip(clouds, weights, strict=True)):
            problem = problem_of(cloud, geometry) or _problem_of_weights(cloud, masses)
            if problem is not None:
                raise UsageError(f"cloud {number}: {problem}")
        size = size or max(map(len, clouds))
        self.entries = {
            "clouds": torch.stack([torch.cat((each, each[:1].expand(size - len(each), -1))) for each in clouds]),
            "weights": torch.stack([F.pad(each.float(), (0, size - len(each))) for each in weights]),
            **(conditions or {}),
        }
        self.conditions = dict(kinds or {})
        self.description = f"{len(self):,} clouds of up to {size} points"

    @property
    def fingerprint(self) -> str:
        """Hash of all entries."""
        digest = sha256()
        for name, values in self.entries.items():
            digest.update(name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.entries["clouds"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.entries.items()}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the entries of some items, ``[b, ...]``."""
        return {name: values[torch.as_tensor(indices)] for name, values in self.entries.items()}


def _problem_of_weights(cloud: Tensor, weights: Tensor) -> str | None:
    if weights.shape != cloud.shape[:1]:
        return f"it has {len(cloud)} points and weights {list(weights.shape)}: give each point a weight"
    sound = bool(weights.isfinite().all()) and bool((weights >= 0).all()) and bool(weights.sum() > 0)
    return None if sound else "its weights must be finite, not negative, and not all zero"


class Clouds(Medium):
    """Clouds of points, drawn as white points on black."""

    space: "Points"
    items = "clouds"

    def render(self, data: Tensor) -> Tensor:
        """Draw white points on black; those on the far side of a sphere, seen along its last axis, are grey."""
        geometry = self.space.geometry
        low, high = geometry.window
        places = (data[..., :2] - low) / (high - low) * PICTURE_SIDE
        columns, rows = places.long().clamp(0, PICTURE_SIDE - 1).unbind(dim=-1)
        far = (data[..., -1] < 0) & isinstance(geometry, Sphere)
        pictures = torch.zeros(len(data), PICTURE_SIDE**2, device=data.device)
        shades = torch.where(far, BACK, FRONT)
        pictures.scatter_reduce_(1, (PICTURE_SIDE - 1 - rows) * PICTURE_SIDE + columns, shades, "amax")
        dots = F.max_pool2d(pictures.reshape(-1, 1, PICTURE_SIDE, PICTURE_SIDE), DOT, stride=1, padding=DOT // 2)
        return dots.to(torch.uint8).expand(-1, 3, -1, -1)

    def problem_with(self, batch: Mapping[str, Tensor]) -> str | None:
        """Describe what is wrong with the clouds of a batch, or return None."""
        return problem_of(batch[self.space.key], self.space.geometry)

    @property
    def noun(self) -> str:
        """The size of a cloud in words."""
        return f"{self.space.shape[0]} points" if self.space.shape else "clouds"


def problem_of(clouds: Tensor, geometry: Geometry) -> str | None:
    """Describe what is wrong with clouds ``[..., n, d]``, or return None."""
    if clouds.ndim < 2 or clouds.shape[-2] == 0 or clouds.shape[-1] != geometry.dim:
        return f"its shape is {tuple(clouds.shape)}; {geometry} needs points [n, {geometry.dim}]"
    off = (clouds - geometry.project(clouds)).abs().amax()
    if not off.isfinite():
        return "points are not finite"
    return None if off <= TOLERANCE else f"points are up to {off:.3g} off the {geometry}: project them"


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

    @property
    def medium(self) -> Medium:
        """The clouds as pictures and in words."""
        return Clouds(self)


def shares(weights: Tensor) -> Tensor:
    """Scale weights ``[b, n]`` of any sum to sum 1 in each row, float32."""
    return weights.float() / weights.float().sum(dim=1, keepdim=True)


def equal_shares(x: Tensor) -> Tensor:
    """Return equal weights ``[b, n]`` of the points of clouds ``[b, n, d]``, with sum 1."""
    return x.new_full(x.shape[:2], 1 / x.shape[1])


def trim(weights: Tensor, *clouds: Tensor) -> tuple[Tensor, ...]:
    """Cut the padding after the last point that any cloud has, and replace the rest of it.

    All sums over points then have the same terms in the same order, however much padding there was: the results are
    equal to the bit. The call waits for the device.

    Args:
        weights: ``[b, n]``; a point of weight 0 is absent.
        clouds: ``[b, n, d]``; absent points become copies of the first point that is present.

    Returns:
        Weights and clouds of fewer points.
    """
    present = weights > 0
    last = int(present.any(dim=0).nonzero().max()) + 1
    first = present.to(torch.uint8).argmax(dim=1)[:, None, None]
    kept = present[:, :last, None]
    filled = [torch.where(kept, x[:, :last], x.gather(1, first.expand(-1, 1, x.shape[2]))) for x in clouds]
    return weights[:, :last], *filled


def pad(x: Tensor, size: int) -> Tensor:
    """Pad clouds ``[b, n, d]`` to ``size`` points by copies of the first point."""
    return torch.cat((x, x[:, :1].expand(-1, size - x.shape[1], -1)), dim=1)


def draw_by_point(draw: Callable[[str, Sequence[int]], Tensor], purpose: str, shape: Sequence[int]) -> Tensor:
    """Draw numbers ``[b, n, ...]`` that are the same for the first points of a cloud, however many points follow.

    Args:
        draw: draws numbers of a shape in the stream of a name, by :mod:`rectified_flow.randomness`.
        purpose: name of the streams.
        shape: ``(b, n, ...)``.
    """
    count, points, *rest = shape
    blocks = [draw(f"{purpose} of points from {first}", (count, BLOCK, *rest)) for first in range(0, points, BLOCK)]
    return torch.cat(blocks, dim=1)[:, :points]
