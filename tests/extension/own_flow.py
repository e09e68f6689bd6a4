"""A flow of one's own: noise and data on a quarter of a circle instead of a line."""

from math import pi
from typing import Any

import torch
from torch import Tensor

from rectified_flow import Flow, randomness, register
from rectified_flow.flows.flow import expand


@register(role="flow", needs=("space", "condition_dropout"))
class CircleFlow(Flow):
    """``x_t = cos(a) x_0 + sin(a) noise`` with ``a = t pi / 2``; the network predicts ``dx/da``."""

    default_steps = 4

    def forward(self, **batch: Any) -> Tensor:
        x_0, noise, conditions = self.draw_batch(batch)
        t = randomness.rand("time", (len(x_0),), x_0.device)
        return self.loss(x_0, noise, t, conditions)

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        a = expand(t * pi / 2, x_0)
        predicted = self.network(a.cos() * x_0 + a.sin() * noise, t, **conditions)
        return (predicted - (a.cos() * noise - a.sin() * x_0)).square().mean()

    @torch.no_grad()
    def sample(self, count: int = 1, *, steps: int = 4, **conditions: Tensor) -> Tensor:
        x, values = self.draw_start(count, conditions)
        with self.evaluating():
            for step in reversed(range(steps)):
                x = x - pi / 2 / steps * self.network(x, x.new_full((len(x),), (step + 1) / steps), **values)
        return self.space.decode(x)
