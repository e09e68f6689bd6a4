"""The one place where pictures become numbers a flow works on, and back."""

import torch
from torch import Tensor

from rectified_flow import randomness


def to_signed(images: Tensor) -> Tensor:
    """uint8 ``[b, c, h, w]`` to float32 in [-1, 1]; floating-point images are taken to be in [-1, 1] already."""
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    return images.float()


def to_unit(x: Tensor) -> Tensor:
    """A flow's ``x`` to float32 images in [0, 1], what lies outside clipped."""
    return x.float().add(1).div(2).clamp(0, 1)


def random_horizontal_flip(x: Tensor) -> Tensor:
    """Mirror each row of ``x`` ``[b, c, h, w]`` left to right with probability 1/2."""
    mirrored = randomness.rand("horizontal flip", (len(x), 1, 1, 1), x.device) < 0.5
    return torch.where(mirrored, x.flip(-1), x)
