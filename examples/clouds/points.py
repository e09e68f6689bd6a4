"""Clouds of points of a geometry, as a dataset stores them and as a flow works on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from geometry import FlatTorus, Geometry, Sphere
from rectified_flow.registry import register
from rectified_flow.spaces.space import Space

SIDE = 64
NOISE_SEEN = 3.0


@register
class Points(Space):
    """Clouds ``[b, n, d]`` of points of a geometry; their weights travel beside them, see :class:`RiemannianFlow`.

    Args:
        geometry: of the points.
        shape: ``(n, d)``; taken from the first training batch if not given.
    """

    key = "clouds"

    def __init__(self, geometry: Geometry, shape: Sequence[int] | None = None) -> None:
        self.geometry = geometry
        self.shape = None if shape is None else tuple(shape)

    def encode(self, data: Tensor) -> Tensor:
        return self.geometry.project(data.float())

    def decode(self, x: Tensor) -> Tensor:
        """Points of the geometry, float32."""
        return self.geometry.project(x.float())

    def render(self, data: Tensor) -> Tensor:
        """White points on black; of a sphere, seen from its last axis, those on the far side are grey."""
        places, near = self._view(data)
        columns, rows = (places * SIDE).long().clamp(0, SIDE - 1).unbind(dim=-1)
        pictures = torch.zeros(len(data), SIDE * SIDE, dtype=torch.uint8, device=data.device)
        shades = torch.where(near, 255, 90).to(torch.uint8)
        pictures.scatter_reduce_(1, (SIDE - 1 - rows) * SIDE + columns, shades, "amax")
        return pictures.reshape(-1, 1, SIDE, SIDE).expand(-1, 3, -1, -1)

    def _view(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Places in the unit square ``[b, n, 2]``, and which points are on the near side."""
        near = torch.ones(data.shape[:-1], dtype=torch.bool, device=data.device)
        match self.geometry:
            case FlatTorus():
                return data[..., :2], near
            case Sphere():
                return (data[..., :2] + 1) / 2, data[..., -1] >= 0
            case _:
                return (data[..., :2] / NOISE_SEEN + 1) / 2, near

    def problem_with(self, data: Tensor) -> str | None:
        if not data.isfinite().all():
            return "points are not finite: leave them out, or give them weight 0"
        if data.shape[-1] != self.geometry.dim:
            return f"points have {data.shape[-1]} coordinates; {self.geometry} takes {self.geometry.dim}"
        problem = self.geometry.problem_with(data)
        return problem and f"points {problem}"

    @property
    def noun(self) -> str:
        return f"{self.shape[0]} points" if self.shape else "clouds"
