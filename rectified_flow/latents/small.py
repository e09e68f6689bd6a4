"""The small autoencoder of the package: eight channels at an eighth of the side."""

from contextlib import nullcontext
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from rectified_flow.errors import UsageError
from rectified_flow.latents.autoencoders import Autoencoder
from rectified_flow.registry import register

WEIGHTS = Path(__file__).with_name("small.safetensors")
CHANNELS, BOUND = 8, 3.0


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


@register
class Small(Autoencoder):
    """The small autoencoder of the package, in float32.

    Args:
        fingerprint: the hash of the weights, if they must be the same as in training; None takes those of the package.
    """

    name = "small"

    def __init__(self, fingerprint: str | None = None) -> None:
        self.fingerprint = fingerprint or _fingerprint()

    def encode(self, pictures: Tensor) -> tuple[Tensor, None]:
        """Return the mean of the latents, and their standard deviation or None."""
        return self._call("encode", pictures), None

    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1], float32."""
        return self._call("decode", latents)

    def prepare(self, device: torch.device) -> None:
        """Load the weights onto ``device``."""
        if self.fingerprint != _fingerprint():
            raise UsageError("--autoencoder small has other weights than in training: install the version of that time")
        _load(device)

    @torch.no_grad()
    def _call(self, method: str, x: Tensor) -> Tensor:
        # On the meta device there is no autocast to disable.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return getattr(_load(x.device), method)(x.float())


@cache
def _load(device: torch.device) -> SmallNetwork:
    """Return the network, shared by all flows of this process; on the meta device it has no weights."""
    with torch.device("meta"):
        network = SmallNetwork()
    if device.type != "meta":
        network.load_state_dict({name: each.float() for name, each in load_file(WEIGHTS).items()}, assign=True)
    return network.to(device).requires_grad_(False)


@cache
def _fingerprint() -> str:
    """Return a hash of the weights."""
    return blake2b(WEIGHTS.read_bytes(), digest_size=16).hexdigest()
