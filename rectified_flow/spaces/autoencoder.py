"""Autoencoders: between pictures and the latents that a flow works on. Frozen, and part of no checkpoint."""

import math
from abc import ABC, abstractmethod

import torch
from einops import rearrange
from torch import Tensor

from rectified_flow.errors import UsageError, require
from rectified_flow.registry import register


class Autoencoder(ABC):
    """Encodes pictures ``[b, 3, s, s]`` in [-1, 1], and decodes their latents ``[b, c, h, w]``, on any device.

    Both also work on torch's meta device, without weights.

    Register a subclass and keep its constructor's arguments as attributes, and checkpoints can name it.
    """

    name: str
    """For display."""
    fingerprint: str
    """Differs between autoencoders that encode differently."""

    @abstractmethod
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and standard deviation of the latents' distribution, float32; None where it is a single point."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures in about [-1, 1], float32."""

    def shape_of(self, image_size: int) -> tuple[int, ...]:
        """``(k, c, h, w)`` of what encodes a picture with that side [px]: a mean, and for ``k = 2`` a deviation.

        Found on torch's meta device, where nothing is computed.

        Raises:
            UsageError: if latents do not decode to the same side.
        """
        pictures = torch.zeros(1, 3, image_size, image_size, device="meta")
        nearest = 2 ** max(3, round(math.log2(image_size)))
        try:
            mean, std = self.encode(pictures)
            decoded = self.decode(mean).shape[-1]
        except RuntimeError as error:
            raise UsageError(
                f"--image_size {image_size} cannot be halved as often as --autoencoder {self.name} does: take a power "
                f"of two, such as {nearest}"
            ) from error
        require(
            decoded == image_size,
            f"--image_size {image_size} comes back from --autoencoder {self.name} as {decoded} px: take a power of "
            f"two, such as {nearest}",
        )
        return 1 if std is None else 2, *mean.shape[1:]

    def prepare(self, device: torch.device) -> None:  # noqa: B027, as most have nothing to load
        """Load the weights, if there are any, onto ``device``.

        Raises:
            UsageError: if they are not there.
        """


@register
class Haar(Autoencoder):
    """The Haar wavelet transform, orthonormal and exact: each level replaces 2x2 pixels by their mean and differences.

    Nothing is compressed or learned. At level 2, latents have 48 channels and a quarter of the side.

    Args:
        levels: how often the side is halved.
    """

    def __init__(self, levels: int = 2) -> None:
        self.levels = levels

    @property
    def name(self) -> str:  # type: ignore[override]
        return "haar"

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return f"haar {self.levels}"

    def encode(self, pictures: Tensor) -> tuple[Tensor, None]:
        x = pictures.float()
        for _ in range(self.levels):
            x = torch.einsum("ij,bcjhw->bcihw", _haar(x), rearrange(x, "b c (h p) (w q) -> b c (p q) h w", p=2, q=2))
            x = x.flatten(1, 2)
        return x, None

    def decode(self, latents: Tensor) -> Tensor:
        x = latents.float()
        for _ in range(self.levels):
            x = torch.einsum("ij,bcihw->bcjhw", _haar(x), x.unflatten(1, (-1, 4)))
            x = rearrange(x, "b c (p q) h w -> b c (h p) (w q)", p=2, q=2)
        return x


def _haar(x: Tensor) -> Tensor:
    """The orthonormal transform of 2x2 pixels ``[4, 4]``: mean, horizontal, vertical and diagonal difference."""
    return x.new_tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
