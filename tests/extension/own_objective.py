"""An objective of one's own: rectified flow by absolute errors. ``loss`` is what ``--compile`` compiles."""

import torch
from torch import Tensor

from rectified_flow import RectifiedFlow, register
from rectified_flow.flows.flow import expand


@register(role="flow")
class AbsoluteFlow(RectifiedFlow):
    """The mean absolute error of the velocity, a function of every draw."""

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        x_t = torch.lerp(x_0, noise, expand(t, x_0))
        return (self.velocity(x_t, t, **conditions) - (noise - x_0)).abs().mean()
