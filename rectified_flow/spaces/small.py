"""The small autoencoder of the package: an eighth of the side, eight channels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, FACTOR, BOUND = 8, 8, 3.0


class Block(nn.Module):
    """A residual block of two 3x3 convolutions; it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        for each in self.second.parameters():
            nn.init.zeros_(each)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the convolutions add to it."""
        return x + self.second(F.silu(self.first(F.silu(x))))


class SmallNetwork(nn.Module):
    """Encoder and decoder, fully convolutional; most of the work is at a quarter and an eighth of the side."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(48, 64, 3, padding=1),
            Block(64),
            nn.PixelUnshuffle(2),
            nn.Conv2d(256, 128, 1),
            Block(128),
            Block(128),
            nn.SiLU(),
            nn.Conv2d(128, CHANNELS, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(CHANNELS, 128, 3, padding=1),
            Block(128),
            Block(128),
            nn.Conv2d(128, 256, 1),
            nn.PixelShuffle(2),
            Block(64),
            Block(64),
            Block(64),
            nn.Conv2d(64, 96, 1),
            nn.PixelShuffle(2),
            Block(24),
            nn.SiLU(),
            nn.Conv2d(24, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def encode(self, pictures: Tensor) -> Tensor:
        """Return the latents, between -3 and 3."""
        return BOUND * torch.tanh(self.encoder(pictures) / BOUND)

    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1]."""
        return self.decoder(latents)
