"""A network of one's own: two convolutions that take a time and a label."""

import torch
from torch import Tensor, nn

from rectified_flow import Labels, register


@register(role="network", needs=("conditions",))
class TwoConvolutions(nn.Module):
    """Called ``network(x, t, **conditions)``; returns the shape of ``x``."""

    def __init__(self, width: int, conditions: dict[str, Labels]) -> None:
        super().__init__()
        self.width, self.conditions = width, conditions
        self.embedding = conditions["labels"].embedding(width)
        self.time = nn.Linear(1, width)
        self.into, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        # x.shape[0] stays variable in an exported program, where len(x) would be the number 2.
        labels = conditions.get("labels", self.conditions["labels"].none(x.shape[0], x.device))
        condition = self.time(t[:, None]) + self.embedding(labels)
        return self.out(torch.relu(self.into(x) + condition[:, :, None, None]))
