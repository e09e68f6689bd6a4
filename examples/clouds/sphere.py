"""A flow whose points move along great circles of the sphere, and the space of its clouds."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectified_flow import Flow, Space, register
from rectified_flow.condition import Values
from rectified_flow.flows.solvers import NO_GUIDANCE, Guidance, guided, take_steps
from rectified_flow.flows.times import Uniform, time_grid

TINY = 1e-12
PICTURE_SIDE, DOT = 96, 5
"""Side of a picture, and side of the square that a point covers [px]."""
FRONT, BACK = 255.0, 90.0
"""Grey values of points on the near and on the far side of the sphere."""


def project(x: Tensor) -> Tensor:
    """Scale points ``[..., 3]`` to norm 1."""
    return x / norm(x).clamp(min=TINY)


def to_tangent(x: Tensor, v: Tensor) -> Tensor:
    """Remove from ``v`` its part along ``x``."""
    return v - (x * v).sum(dim=-1, keepdim=True) * x


def exp(x: Tensor, v: Tensor) -> Tensor:
    """Return the point that the great circle from ``x`` with velocity ``v`` reaches at time 1."""
    angle = norm(v)
    return project(angle.cos() * x + torch.sinc(angle / torch.pi) * v)


def log(x: Tensor, y: Tensor) -> Tensor:
    """Return the shortest ``v`` with ``exp(x, v) = y``."""
    cosine = (x * y).sum(dim=-1, keepdim=True)
    # The tangent part of the small difference to y, or to its antipode, keeps the digits that y itself would lose.
    across = to_tangent(x, y - torch.where(cosine >= 0, 1.0, -1.0) * x)
    sine = norm(across)
    return torch.atan2(sine, cosine) * across / sine.clamp(min=TINY)


def transport(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Transport the tangent vector ``v`` at ``x`` in parallel along the great circle to ``y``."""
    along = (y * v).sum(dim=-1, keepdim=True) / (1 + (x * y).sum(dim=-1, keepdim=True)).clamp(min=TINY)
    return v - along * (x + y)


def norm(x: Tensor) -> Tensor:
    """Return the norms ``[..., 1]`` of vectors ``[..., 3]``."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


@register
class Points(Space):
    """Clouds ``[b, n, 3]`` of points on the unit sphere.

    Args:
        shape: ``(n, 3)``; that of the first training batch if not given.
    """

    key = "clouds"

    def __init__(self, shape: Sequence[int] | None = None) -> None:
        self.shape = None if shape is None else tuple(shape)

    def encode(self, data: Tensor) -> Tensor:
        """Project stored points onto the sphere, float32."""
        return project(data.float())

    def decode(self, x: Tensor) -> Tensor:
        """Return points of the sphere, float32."""
        return project(x.float())

    def render(self, data: Tensor) -> Tensor:
        """Draw points on black, seen along the last axis: white in front, grey on the far side."""
        columns, rows = ((data[..., :2] + 1) / 2 * PICTURE_SIDE).long().clamp(0, PICTURE_SIDE - 1).unbind(dim=-1)
        shades = torch.where(data[..., 2] < 0, BACK, FRONT)
        pictures = torch.zeros(len(data), PICTURE_SIDE**2, device=data.device)
        pictures.scatter_reduce_(1, (PICTURE_SIDE - 1 - rows) * PICTURE_SIDE + columns, shades, "amax")
        dots = F.max_pool2d(pictures.reshape(-1, 1, PICTURE_SIDE, PICTURE_SIDE), DOT, stride=1, padding=DOT // 2)
        return dots.to(torch.uint8).expand(-1, 3, -1, -1)


@register
class SphereFlow(Flow):
    """Flow matching along great circles (Chen & Lipman 2023, arXiv:2302.03660), for clouds of points.

    Each point of a cloud comes from a uniform random point of the sphere. The output of the network is projected onto
    the tangent space.

    Args:
        network: called ``network(x, t, **conditions)``.
        settings: settings of :class:`rectified_flow.Flow`.
    """

    def __init__(self, network: nn.Module, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.time_distribution = Uniform()  # much is decided near the noise, where the times for pictures are rare

    def forward(self, **batch: Any) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss."""
        x_0, noise, conditions = self.draw_batch(batch)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        return self.loss(x_0, project(noise), t, conditions)

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Values) -> Tensor:
        """Return the mean squared error of the velocity along great circles from ``x_0`` to ``noise``."""
        v, times = log(x_0, noise), t[:, None, None]
        angle = norm(v)
        # Not transported in parallel, which is undefined half a turn away.
        velocity = (times * angle).cos() * v - angle * (times * angle).sin() * x_0
        return (self.velocity(exp(x_0, times * v), t, **conditions) - velocity).square().mean()

    def velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        """Return the predicted velocity at ``x``, in the tangent space."""
        return to_tangent(x, self.network(x, t, **conditions).float())

    @torch.no_grad()
    def sample(
        self,
        count: int = 1,
        *,
        steps: int = 16,
        guidance: Guidance = NO_GUIDANCE,
        noise: Tensor | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Generate clouds ``[b, n, 3]`` from normal ``noise`` by midpoint steps along great circles."""
        z, values = self.draw_start(count, conditions, noise=noise)
        field = guided(self.velocity, self.conditions, values, guidance)

        def midpoint(x: Tensor, t: float, t_next: float) -> Tensor:
            dt = t_next - t
            middle = exp(x, dt / 2 * field(x, t))
            return exp(x, dt * transport(middle, x, field(middle, t + dt / 2)))

        with self.evaluating():
            return self.space.decode(take_steps(midpoint, project(z), time_grid(steps)))
