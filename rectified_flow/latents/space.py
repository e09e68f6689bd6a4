"""Latents: data as a frozen autoencoder encodes them, which a store keeps, normalised for a flow to work on."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.errors import UsageError
from rectified_flow.flags import choose, split_part
from rectified_flow.latents.autoencoders import Autoencoder, PretrainedAutoencoder
from rectified_flow.registry import names, register
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import RGB, Shape, Space

PIXELS_AT_ONCE = 2**20  # pixels that are encoded or decoded at once: their activations take many times the memory


class StoredLatents(Space):
    """Latents of any data, ``[b, c, ...]``, of which a store keeps the autoencoder's distributions.

    Stored data are ``[b, v, k, c, ...]``: for each of ``v`` variants of the datum (as it is, and perhaps its mirror
    image) the mean, and for ``k = 2`` the standard deviation of its latents' distribution, as the autoencoder gives
    them. Training draws a variant, and its latents from their distribution, afresh at each step.

    Args:
        shape: ``(c, ...)``.
        mean: mean of each channel; 0 if not given.
        std: standard deviation of each channel, by which latents are divided; 1 if not given.

    Raises:
        ValueError: if the number of means or standard deviations is not the number of channels.
    """

    key = "latents"

    def __init__(self, shape: Shape, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        self.shape = tuple(shape)
        self.mean = list(mean) or [0.0] * self.shape[0]
        self.std = list(std) or [1.0] * self.shape[0]
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError(f"{len(self.mean)} means and {len(self.std)} deviations for {self.shape[0]} channels")
        self._placed: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        """Draw a variant of each row, and latents from its distribution: ``[b, 1, 1, c, ...]``, float32."""
        rows = torch.arange(len(data), device=data.device)
        if data.shape[1] > 1:
            data = data[rows, randomness.randint("variant", data.shape[1], (len(data),), data.device)][:, None]
        latents = data[:, :1, :1].float()
        if data.shape[2] > 1:
            noise = randomness.randn("latents", (len(data), *data.shape[3:]), data.device)
            latents = latents + data[:, :1, 1:].float() * noise[:, None, None]
        return latents, {}

    def encode(self, data: Tensor) -> Tensor:
        """Return the mean of the first variant's distribution, normalised."""
        mean, std = self._scales(data.device)
        return (data[:, 0, 0].float() - mean) / std

    def to_stored(self, x: Tensor) -> Tensor:
        """Return a single variant without a standard deviation, float16 ``[b, 1, 1, c, ...]``."""
        return self.unscaled(x)[:, None, None].half()

    def unscaled(self, x: Tensor) -> Tensor:
        """Return latents on the scale of the autoencoder, float32."""
        mean, std = self._scales(x.device)
        return x.float() * std + mean

    def problem_with(self, data: Tensor) -> str | None:
        """Return a sentence on latents of another shape or that are not finite, or None."""
        if tuple(data.shape[3:]) != self.shape:
            return f"stored latents are {tuple(data.shape[3:])}, and those of the autoencoder {self.shape}"
        return None if data.isfinite().all() else "latents are not finite"

    def _scales(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._placed:  # once, as a copy to the device waits for it
            trailing = [1] * (len(self.shape or ()) - 1)
            mean, std = torch.tensor([self.mean, self.std], device=device).reshape(2, -1, *trailing)
            self._placed[device] = mean, std
        return self._placed[device]


@register
class Latents(StoredLatents):
    """Latents ``[b, c, h, w]`` of pictures, each channel of mean 0 and standard deviation 1 over the training pictures.

    Generated data are pictures, float32 in [0, 1].

    Args:
        autoencoder: autoencoder that encoded the pictures.
        image_size: short side of the pictures [px].
        shape: shape ``(c, h, w)`` of the latents; by default, that of the latents of a square picture.
        mean: mean of each channel.
        std: standard deviation of each channel.
    """

    def __init__(
        self,
        autoencoder: Autoencoder,
        image_size: int,
        shape: Shape | None = None,
        *,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> None:
        super().__init__(shape or autoencoder.shape_of(image_size)[1:], mean, std)
        self.autoencoder: Autoencoder = autoencoder
        self.image_size = image_size
        self._pixels = Pixels(self.picture_shape)

    @classmethod
    def of(cls, autoencoder: Sequence[str], shape: Shape) -> "Latents":
        """Build the space for pictures ``(c, h, w)`` and the autoencoder of the flags; scales are measured later.

        Raises:
            UsageError: if it does not exist, or the size of the pictures does not suit it.
        """
        name, options = split_part(autoencoder)
        part = ["Small" if name == "small" else name, *options]
        is_registered = bool(options) or part[0] in names(Autoencoder)
        found = choose("autoencoder", Autoencoder, part).build() if is_registered else PretrainedAutoencoder(name)
        return cls(found, min(shape[1:]), found.shape_of(*shape[1:])[1:])

    def encode_all(self, pictures: Any, *, mirrored: bool) -> tuple[Any, Space]:
        """Return the latents of all pictures and of their sources, and the space with the scales of the latents."""
        from rectified_flow.latents.store import encode_pictures  # imports this module

        latents = encode_pictures(pictures.whole, self.autoencoder, mirrored=mirrored)
        source = pictures.source and encode_pictures(pictures.source, self.autoencoder, mirrored=mirrored)
        return latents.like(pictures, source), latents.space_of(self.autoencoder)

    def use_autoencoder(self, place: str) -> None:
        """Replace the autoencoder of a folder or hub id."""
        if not isinstance(self.autoencoder, PretrainedAutoencoder):
            super().use_autoencoder(place)
        self.autoencoder = PretrainedAutoencoder(place, self.autoencoder.fingerprint)

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """The shape of the pictures that are encoded."""
        _, *sides = self.shape or ()
        return RGB, *(self.image_size * side // min(sides) for side in sides)

    def scaled_like(self, other: Space) -> Space:
        """Return the other space of latents with the autoencoder of this space, whose folder may have moved.

        Raises:
            UsageError: if the other space has another autoencoder.
        """
        assert isinstance(other, Latents)  # a teacher's run has the autoencoder of this one
        if other.autoencoder.fingerprint != self.autoencoder.fingerprint:
            raise UsageError(f"--autoencoder {self.autoencoder.name} is not the teacher's autoencoder: leave it out")
        other.autoencoder = self.autoencoder
        return other

    def on_page(self) -> None:
        """Return None: an exported program shows the pictures of the decoder."""

    def decoder(self) -> nn.Module:
        """Return the decoder of the autoencoder, for latents as the flow has them."""
        return Decoder(self)

    def decode(self, x: Tensor) -> Tensor:
        """Return pictures in [0, 1], decoded some at a time."""
        parts = self.unscaled(x).split(self._at_once)
        return self._pixels.decode(torch.cat([self.autoencoder.decode(part) for part in parts]))

    def render(self, data: Tensor) -> Tensor:
        """Render decoded pictures."""
        return self._pixels.render(data)

    def from_pictures(self, pictures: Tensor) -> Tensor:
        """Encode pictures some at a time, as a single variant ``[b, 1, k, c, h, w]``."""
        parts = self._pixels.encode(pictures).split(self._at_once)
        encoded = [self.autoencoder.encode(part) for part in parts]
        return torch.cat([torch.stack([each for each in pair if each is not None], dim=1) for pair in encoded])[:, None]

    def prepare(self, device: torch.device) -> None:
        """Load the autoencoder onto ``device``."""
        self.autoencoder.prepare(device)

    @property
    def noun(self) -> str:
        """The sides of a picture and the name of the autoencoder."""
        return f"{self._pixels.noun} by {self.autoencoder.name}"

    @property
    def _at_once(self) -> int:
        return max(1, PIXELS_AT_ONCE // math.prod(self.picture_shape[1:]))


class Decoder(nn.Module):
    """The decoder of a space of latents as a module, called with ``x``."""

    def __init__(self, space: Latents) -> None:
        super().__init__()
        self.autoencoder = space.autoencoder
        self.autoencoder.prepare(torch.device("cpu"))
        shape = (-1, *[1] * (len(space.shape or ()) - 1))
        self.mean, self.std = (torch.tensor(scale).reshape(shape) for scale in (space.mean, space.std))

    def forward(self, x: Tensor) -> Tensor:
        """Return pictures ``[b, 3, h, w]`` in about [-1, 1]."""
        return self.autoencoder.decode(x * self.std + self.mean)
