"""A distribution of the training times of one's own: a power of uniform times."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rectified_flow import randomness, register
from rectified_flow.flows.times import TimeDistribution


@register
@dataclass(frozen=True)
class PowerOfUniform(TimeDistribution):
    """Times ``u ** power``."""

    power: float

    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        return randomness.rand(purpose, (count,), device) ** self.power
