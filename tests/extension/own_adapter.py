"""A frozen base with an adapter: only the adapter is trained, averaged and saved, as the base comes from elsewhere."""

import torch
from torch import Tensor, nn

from rectified_flow import register


@register(role="network")
class Adapted(nn.Module):
    """A base network in bfloat16, whose weights the constructor loads, plus a trained convolution."""

    frozen_source = "seed 7"  # where the frozen weights come from: they stand in no checkpoint

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.base = nn.Conv2d(3, 3, 3, padding=1).bfloat16().requires_grad_(False)
        self.adapter = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 3, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)
