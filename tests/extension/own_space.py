"""A data space of one's own, with its network and dataset: clouds of points, rendered as white dots on black."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rectified_flow import DataFacts, Medium, Space, register

SIDE = 16


class Dots(Medium):
    """White dots on black."""

    space: "Clouds"
    items = "clouds"

    def render(self, data: Tensor) -> Tensor:
        places = ((data / self.space.scale + 2) / 4 * SIDE).long().clamp(0, SIDE - 1)
        pictures = torch.zeros(len(data), SIDE * SIDE, dtype=torch.uint8, device=data.device)
        pictures.scatter_(1, places[..., 1] * SIDE + places[..., 0], 255)
        return pictures.reshape(-1, 1, SIDE, SIDE).expand(-1, 3, -1, -1)


@register
class Clouds(Space):
    """Points ``[b, n, 2]`` in metres; the flow works in units of ``scale`` metres."""

    key = "points"

    def __init__(self, shape: Sequence[int], scale: float) -> None:
        self.shape, self.scale = tuple(shape), scale

    @classmethod
    def of(cls, facts: DataFacts, /, *, scale: float) -> "Clouds":
        return cls(facts.shape, scale)

    @property
    def medium(self) -> Dots:
        return Dots(self)

    def encode(self, data: Tensor) -> Tensor:
        return data.float() / self.scale

    def decode(self, x: Tensor) -> Tensor:
        return x * self.scale


@register(role="network")
class PointNetwork(nn.Module):
    """Each point by itself, with the mean of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(5, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        context = torch.cat((x.mean(dim=1), t[:, None]), dim=1)[:, None].expand(-1, x.shape[1], -1)
        return self.layers(torch.cat((x, context), dim=2))


@register(role="dataset")
def rings(count: int = 20) -> list[dict[str, Tensor]]:
    """Return rings of five points."""
    angles = torch.arange(5) * 2 * torch.pi / 5 + torch.arange(count)[:, None]
    return [{"points": ring} for ring in 300 * torch.stack((angles.cos(), angles.sin()), dim=2)]
