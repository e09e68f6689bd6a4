"""An autoencoder of one's own: the Haar wavelet transform, orthonormal and exact."""

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from rectified_flow import Autoencoder, register

TRANSFORM = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
"""The mean of 2x2 pixels, and their horizontal, vertical and diagonal differences, as a matrix."""


@register
class Haar(Autoencoder):
    """Each level replaces 2x2 pixels by their mean and differences: half of the side, four times the channels.

    Args:
        levels: number of times that the side is halved.
    """

    name = "haar"

    def __init__(self, levels: int = 2) -> None:
        self.levels, self.fingerprint = levels, f"haar {levels}"

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        x = pictures.float()
        for _ in range(self.levels):
            pixels = pixel_unshuffle(x, 2).unflatten(1, (-1, 4))
            x = torch.einsum("ij,bcjhw->bcihw", TRANSFORM.to(x), pixels).flatten(1, 2)
        return x, None

    def decode(self, latents: Tensor) -> Tensor:
        x = latents.float()
        for _ in range(self.levels):
            pixels = torch.einsum("ij,bcihw->bcjhw", TRANSFORM.to(x), x.unflatten(1, (-1, 4)))
            x = pixel_shuffle(pixels.flatten(1, 2), 2)
        return x
