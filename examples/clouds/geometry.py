"""Geometries of points: the plane and its like, the sphere and the flat torus.

Points, and tangent vectors at them, are float32 ``[..., dim]``. All functions are differentiable. The formulas are
textbook ones, written so that float32 keeps its digits for near points and for antipodes, where ``arccos`` of a scalar
product has lost half of them. (geoopt, the library for this, clips that ``arccos``: its distances of 0.01 on the sphere
are wrong by up to 41%. It has no flat torus.)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rectified_flow.registry import register

TOLERANCE = 1e-3


class Geometry(ABC):
    """Points in a space with straightest lines. Register a subclass, and checkpoints can name it."""

    dim: int
    """Numbers of a point."""

    @abstractmethod
    def from_normal(self, z: Tensor) -> Tensor:
        """Standard normal numbers ``[..., dim]`` to points of the noise: normal in the plane, else uniform."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """The nearest point."""

    @abstractmethod
    def to_tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """The nearest tangent vector at ``x``."""

    @abstractmethod
    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        """Where the straightest line that starts in ``x`` with velocity ``v`` is at time 1."""

    @abstractmethod
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The shortest ``v`` with ``exp(x, v) = y``; one of them where there are several."""

    @abstractmethod
    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The vector ``v`` at ``x``, moved in parallel along the shortest line to ``y``."""

    @abstractmethod
    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Of points ``[..., dim]``: ``[...]``."""

    @abstractmethod
    def coordinates(self, x: Tensor) -> Tensor:
        """Smooth functions ``[..., k]`` of the point, of about unit scale, that tell points apart, for a network."""

    @abstractmethod
    def problem_with(self, x: Tensor) -> str | None:
        """What is wrong with points, or None; ends a sentence that begins with their name."""

    def geodesic(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The point at time ``t`` of the shortest line from ``x`` at 0 to ``y`` at 1, and the line's velocity there."""
        v = self.log(x, y)
        point = self.exp(x, t * v)
        return point, self.transport(x, point, v)


@register
@dataclass(frozen=True)
class Euclidean(Geometry):
    """The plane, for ``dim`` 2."""

    dim: int = 2

    def from_normal(self, z: Tensor) -> Tensor:
        return z

    def project(self, x: Tensor) -> Tensor:
        return x

    def to_tangent(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        return x + v

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return v

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        return (y - x).square().sum(dim=-1)

    def coordinates(self, x: Tensor) -> Tensor:
        return x

    def problem_with(self, x: Tensor) -> str | None:
        return None

    def geodesic(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return (1 - t) * x + t * y, y - x  # rounded as in RectifiedFlow


@register
@dataclass(frozen=True)
class Sphere(Geometry):
    """The unit sphere in ``dim`` dimensions; ``dim`` 3 has the surface of a ball."""

    dim: int = 3

    def from_normal(self, z: Tensor) -> Tensor:
        return self.project(z)

    def project(self, x: Tensor) -> Tensor:
        return x / _norm(x).clamp(min=_TINY)

    def to_tangent(self, x: Tensor, v: Tensor) -> Tensor:
        return v - (x * v).sum(dim=-1, keepdim=True) * x

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        angle = _norm(v)
        return self.project(angle.cos() * x + torch.sinc(angle / torch.pi) * v)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """At antipodes, along a meridian of the axis that is farthest from them."""
        cosine = (x * y).sum(dim=-1, keepdim=True)
        near = torch.where(cosine >= 0, 1.0, -1.0)
        across = self.to_tangent(x, y - near * x)  # of the small difference to y or to its antipode: keeps the digits
        sine = _norm(across)
        axis = torch.nn.functional.one_hot(x.abs().argmin(dim=-1), x.shape[-1]).to(x)
        away = self.project(self.to_tangent(x, axis))
        direction = torch.where(sine > _TINY, across / sine.clamp(min=_TINY), torch.where(cosine < 0, away, across))
        return torch.atan2(sine, cosine) * direction

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        along = (y * v).sum(dim=-1, keepdim=True) / (1 + (x * y).sum(dim=-1, keepdim=True)).clamp(min=_TINY)
        return v - along * (x + y)

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        return (2 * torch.atan2(_norm(y - x), _norm(y + x)).squeeze(-1)).square()

    def coordinates(self, x: Tensor) -> Tensor:
        return x * self.dim**0.5

    def problem_with(self, x: Tensor) -> str | None:
        off = float((_norm(x) - 1).abs().amax())
        return f"reach {off:.3g} off the unit sphere; scale each to norm 1" if off > TOLERANCE else None

    def geodesic(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Without parallel transport, which has no answer half a turn away."""
        v = self.log(x, y)
        angle = _norm(v)
        sine, cosine = (t * angle).sin(), (t * angle).cos()
        return self.exp(x, t * v), cosine * v - angle * sine * x


@register
@dataclass(frozen=True)
class FlatTorus(Geometry):
    """Coordinates in [0, 1), where each end is glued to the other; ``dim`` 2 is the usual torus."""

    dim: int = 2

    def from_normal(self, z: Tensor) -> Tensor:
        return self.project(torch.special.ndtr(z))

    def project(self, x: Tensor) -> Tensor:
        x = x - x.floor()
        return torch.where(x >= 1, torch.zeros_like(x), x)  # as -1e-9 + 1 is 1 in float32

    def to_tangent(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        return self.project(x + v)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return (y - x) - (y - x).round()

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return v

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        return self.log(x, y).square().sum(dim=-1)

    def coordinates(self, x: Tensor) -> Tensor:
        angles = 2 * torch.pi * x
        return 2**0.5 * torch.cat((angles.cos(), angles.sin()), dim=-1)

    def problem_with(self, x: Tensor) -> str | None:
        least, most = (float(value) for value in x.aminmax())
        if least >= 0 and most < 1:
            return None
        return f"reach from {least:.3g} to {most:.3g}; the torus has coordinates in [0, 1): take them modulo 1"


_TINY = 1e-12


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)
