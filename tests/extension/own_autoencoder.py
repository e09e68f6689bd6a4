"""An autoencoder of one's own: 2x2 pixels become channels, brightness in a unit of its own."""

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from rectified_flow import Autoencoder, register


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
