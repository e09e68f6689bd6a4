"""An autoencoder of one's own: 2x2 pixels become channels, brightness in a unit of its own."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from rectified_flow import Autoencoder, Latents, RectifiedFlow, Unet, register


@register
class Folded(Autoencoder):
    """Half of the side, four times the channels.

    Args:
        unit: latents are pixels divided by this.
    """

    name = "folded"

    def __init__(self, unit: float) -> None:
        self.unit, self.fingerprint = unit, f"folded {unit}"

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        return pixel_unshuffle(pictures, 2) / self.unit, None

    def decode(self, latents: Tensor) -> Tensor:
        return pixel_shuffle(latents * self.unit, 2)


def build() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The flow, and latents of pictures as a store has them."""
    space = Latents(Folded(0.5), 8)
    pictures = torch.arange(20 * 192).reshape(20, 3, 8, 8).mul(11).remainder(256).to(torch.uint8)
    network = Unet(8, (1,), channels=12, image_size=4)
    return RectifiedFlow(network, space=space), [{"latents": each} for each in space.from_pictures(pictures)]
