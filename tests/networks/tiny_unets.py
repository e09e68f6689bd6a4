"""A small Unet and its inputs."""

import torch
from torch import Tensor

from rectified_flow.networks.unet import Unet


def small(**settings: object) -> Unet:
    """A Unet of 8 px with weights that are not zero, so that what it computes shows."""
    torch.manual_seed(0)
    unet = Unet(**{"dim": 16, "dim_mults": (1, 2), "image_size": 8, "attention_sides": (4,), **settings})  # type: ignore[arg-type]
    for parameter in filter(lambda parameter: parameter.requires_grad, unet.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    return unet


def inputs(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    t = torch.rand(count)
    return torch.randn(count, 3, 8, 8), t, t * torch.rand(count)
