"""A network of one's own: two convolutions that take a time and a label."""

import torch
from torch import Tensor, nn

from rectified_flow import Labels, Pixels, RectifiedFlow, register


@register
class TwoConvolutions(nn.Module):
    """Called ``network(x, t, **conditions)``; returns the shape of ``x``."""

    def __init__(self, width: int, conditions: dict[str, Labels]) -> None:
        super().__init__()
        self.width, self.conditions = width, conditions
        self.embedding = conditions["labels"].embedding(width)
        self.time = nn.Linear(1, width)
        self.into, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        labels = conditions.get("labels", self.conditions["labels"].none(len(x), x.device))
        condition = self.time(t[:, None]) + self.embedding(labels)
        return self.out(torch.relu(self.into(x) + condition[:, :, None, None]))


def build() -> tuple[nn.Module, list[tuple[Tensor, int]]]:
    """The flow, and items of pictures and labels."""
    flow = RectifiedFlow(TwoConvolutions(8, {"labels": Labels(2)}), space=Pixels((3, 8, 8)), condition_dropout=0.1)
    pictures = torch.arange(20 * 3 * 64).reshape(20, 3, 8, 8).mul(7).remainder(256).to(torch.uint8)
    return flow, [(picture, number % 2) for number, picture in enumerate(pictures)]
