"""An objective of one's own: rectified flow by absolute errors. ``loss`` is what ``--compile`` compiles."""

import torch
from torch import Tensor, nn

from rectified_flow import Pixels, RectifiedFlow, Unet, register
from rectified_flow.flows.flow import expand


@register
class AbsoluteFlow(RectifiedFlow):
    """The mean absolute error of the velocity, a function of every draw."""

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        x_t = torch.lerp(x_0, noise, expand(t, x_0))
        return (self.velocity(x_t, t, **conditions) - (noise - x_0)).abs().mean()


def build() -> tuple[nn.Module, list[Tensor]]:
    """The flow, and pictures."""
    flow = AbsoluteFlow(Unet(8, (1, 2), image_size=8), space=Pixels((3, 8, 8)))
    return flow, list(torch.arange(20 * 192).reshape(20, 3, 8, 8).mul(3).remainder(256).to(torch.uint8))
