"""Geometries of points: the plane, the sphere and the flat torus.

Points, and tangent vectors at them, are float32 ``[..., dim]``. All functions are differentiable. The formulas are
textbook ones, written so that float32 keeps its digits for near points and for antipodes, where ``arccos`` of a scalar
product has lost half of them. (geoopt, the library for this, clips that ``arccos``: its distances of 0.01 on the sphere
are wrong by up to 41%. It has no flat torus.)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rectified_flow import register

_TINY = 1e-12


class Geometry(ABC):
    """A space with geodesics. Methods that are not abstract are those of a flat space.

    Register a subclass with :func:`rectified_flow.register`, and checkpoints can name it.
    """

    dim: int
    """Numbers of a point."""
    window: ClassVar[tuple[float, float]]
    """Range of the coordinates that a picture shows."""

    @abstractmethod
    def from_normal(self, z: Tensor) -> Tensor:
        """Map standard normal numbers ``[..., dim]`` to noise: normal in the plane, uniform elsewhere."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """Return the nearest point of the geometry."""

    @abstractmethod
    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the point that the geodesic from ``x`` with velocity ``v`` reaches at time 1."""

    @abstractmethod
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the shortest ``v`` with ``exp(x, v) = y``; one of them where there are several."""

    @abstractmethod
    def coordinates(self, x: Tensor) -> Tensor:
        """Return smooth functions ``[..., k]`` of a point, of about unit scale, as inputs of a network."""

    def to_tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """Project ``v`` onto the tangent space at ``x``."""
        return v

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Transport the tangent vector ``v`` at ``x`` in parallel along the shortest geodesic to ``y``."""
        return v

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the squared geodesic distance ``[...]`` of points ``[..., dim]``."""
        return self.log(x, y).square().sum(dim=-1)

    def geodesic(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the point at time ``t`` of the shortest geodesic from ``x`` to ``y``, and the velocity there."""
        v = self.log(x, y)
        point = self.exp(x, t * v)
        return point, self.transport(x, point, v)


@register
@dataclass(frozen=True)
class Euclidean(Geometry):
    """Euclidean space; the plane for ``dim`` 2."""

    dim: int = 2
    window = (-3.0, 3.0)

    def from_normal(self, z: Tensor) -> Tensor:
        """Return ``z``: the noise is normal."""
        return z

    def project(self, x: Tensor) -> Tensor:
        """Return ``x``: every point belongs to the plane."""
        return x

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the end of a straight line."""
        return x + v

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the difference."""
        return y - x

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the point itself."""
        return x

    def geodesic(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return a point of a straight line, and the line's velocity."""
        return (1 - t) * x + t * y, y - x  # rounded as in RectifiedFlow


@register
@dataclass(frozen=True)
class Sphere(Geometry):
    """The unit sphere in ``dim`` dimensions; the surface of a ball for ``dim`` 3."""

    dim: int = 3
    window = (-1.0, 1.0)

    def from_normal(self, z: Tensor) -> Tensor:
        """Return points with the directions of ``z``, which are uniform."""
        return self.project(z)

    def project(self, x: Tensor) -> Tensor:
        """Scale to norm 1."""
        return x / _norm(x).clamp(min=_TINY)

    def to_tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """Remove the part along ``x``."""
        return v - (x * v).sum(dim=-1, keepdim=True) * x

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the end of an arc of a great circle."""
        angle = _norm(v)
        return self.project(angle.cos() * x + torch.sinc(angle / torch.pi) * v)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the shortest ``v``; at antipodes, along a meridian of the axis that is farthest from them."""
        cosine = (x * y).sum(dim=-1, keepdim=True)
        near = torch.where(cosine >= 0, 1.0, -1.0)
        # The tangent part of the small difference to y, or to its antipode, keeps the digits that y itself would lose.
        across = self.to_tangent(x, y - near * x)
        sine = _norm(across)
        away = self.project(self.to_tangent(x, one_hot(x.abs().argmin(dim=-1), x.shape[-1]).to(x)))
        direction = torch.where(sine > _TINY, across / sine.clamp(min=_TINY), torch.where(cosine < 0, away, across))
        return torch.atan2(sine, cosine) * direction

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Rotate ``v`` along with the great circle through ``x`` and ``y``."""
        along = (y * v).sum(dim=-1, keepdim=True) / (1 + (x * y).sum(dim=-1, keepdim=True)).clamp(min=_TINY)
        return v - along * (x + y)

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the squared angle between the points."""
        return (2 * torch.atan2(_norm(y - x), _norm(y + x)).squeeze(-1)).square()

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the coordinates at unit scale."""
        return x * self.dim**0.5

    def geodesic(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return point and velocity without parallel transport, which is not defined half a turn away."""
        v = self.log(x, y)
        angle = _norm(v)
        sine, cosine = (t * angle).sin(), (t * angle).cos()
        return self.exp(x, t * v), cosine * v - angle * sine * x


@register
@dataclass(frozen=True)
class FlatTorus(Geometry):
    """Coordinates in [0, 1) with both ends of each axis glued together; the usual torus for ``dim`` 2."""

    dim: int = 2
    window = (0.0, 1.0)

    def from_normal(self, z: Tensor) -> Tensor:
        """Map normal numbers to uniform ones by their distribution function."""
        return self.project(torch.special.ndtr(z))

    def project(self, x: Tensor) -> Tensor:
        """Return the coordinates modulo 1."""
        x = x - x.floor()
        return torch.where(x >= 1, torch.zeros_like(x), x)  # as -1e-9 + 1 is 1 in float32

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the end of a straight line, modulo 1."""
        return self.project(x + v)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the difference to the nearest copy of ``y``."""
        return (y - x) - (y - x).round()

    def coordinates(self, x: Tensor) -> Tensor:
        """Return cosine and sine of each coordinate as an angle."""
        angles = 2 * torch.pi * x
        return 2**0.5 * torch.cat((angles.cos(), angles.sin()), dim=-1)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)
