"""Latents: data as a frozen autoencoder encodes them, which a store keeps, normalised for a flow to work on."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.data.framing import Framing
from rectified_flow.data.store import ImageDataset, StoreDataset, mapped
from rectified_flow.data.store_writer import StoreWriter, claimed, fill, key_of
from rectified_flow.distributed import join_processes
from rectified_flow.errors import UsageError
from rectified_flow.latents.autoencoders import Autoencoder, PretrainedAutoencoder
from rectified_flow.parts import choose, split_part
from rectified_flow.registry import describe, names, register
from rectified_flow.spaces.pictures import GREY, RGB, Pictures
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import DataFacts, Shape, Space

PIXELS_AT_ONCE = 2**20
"""Pixels that are encoded or decoded at once, unless the autoencoder says: activations take many times the memory."""


class StoredLatents(Space):
    """Latents of any data, ``[b, c, ...]``, of which a store keeps the autoencoder's distributions.

    Stored data are ``[b, v, k, c, ...]``: for each of ``v`` variants of the datum (as it is, and perhaps its mirror
    image) the mean, and for ``k = 2`` the standard deviation of its latents' distribution, as the autoencoder gives
    them. Training draws a variant, and its latents from their distribution, afresh at each step.

    Args:
        shape: ``(c, ...)``.
        mean: mean of each channel; 0 if not given.
        std: standard deviation of each channel, by which latents are divided; 1 if not given.
    """

    key = "latents"

    def __init__(self, shape: Shape, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        self.shape = tuple(shape)
        self.mean = list(mean) or [0.0] * self.shape[0]
        self.std = list(std) or [1.0] * self.shape[0]
        self._placed: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @override
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

    @override
    def encode(self, data: Tensor) -> Tensor:
        mean, std = self._scales(data.device)
        return (data[:, 0, 0].float() - mean) / std

    @override
    def to_stored(self, x: Tensor, *, exact: bool = False) -> Tensor:
        stored = self.unscaled(x)[:, None, None]
        return stored if exact else stored.half()

    def unscaled(self, x: Tensor) -> Tensor:
        """Return latents on the scale of the autoencoder, float32."""
        mean, std = self._scales(x.device)
        return x.float() * std + mean

    def _scales(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._placed:  # once, as a copy to the device waits for it
            trailing = [1] * (len(self.shape or ()) - 1)
            mean, std = torch.tensor([self.mean, self.std], device=device).reshape(2, -1, *trailing)
            self._placed[device] = mean, std
        return self._placed[device]


@register
class Latents(StoredLatents):
    """Latents ``[b, c, h, w]`` of pictures, each channel of mean 0 and standard deviation 1 over the training pictures.

    It is a space around the space of pixels: generated data are pictures, float32 in [0, 1].

    Args:
        autoencoder: autoencoder that encoded the pictures.
        image_size: short side of the pictures [px].
        shape: shape ``(c, h, w)`` of the latents; by default, that of the latents of a square picture.
        grey: whether the pictures are grey: the autoencoder gets three equal channels, and their mean is the picture.
        scale: ``mean`` and ``std`` of each channel.
    """

    uses: ClassVar[Collection[str]] = ("autoencoder",)

    def __init__(
        self,
        autoencoder: Autoencoder,
        image_size: int,
        shape: Shape | None = None,
        *,
        grey: bool = False,
        **scale: Sequence[float],
    ) -> None:
        super().__init__(shape or autoencoder.shape_of(image_size)[1:], **scale)
        self.autoencoder: Autoencoder = autoencoder
        self.image_size, self.grey = image_size, grey
        _, *sides = self.shape or ()
        self.pixels = Pixels((GREY if grey else RGB, *(image_size * side // min(sides) for side in sides)))
        """The space of the pictures."""

    @classmethod
    @override
    def of(cls, facts: DataFacts, /) -> "Latents":
        if not facts.autoencoder:
            raise UsageError("Latents need an autoencoder: pass `autoencoder`")
        from rectified_flow.latents.in_step import LatentsInStep  # a subclass of this class

        autoencoder, sides = autoencoder_of(facts.autoencoder), facts.shape[1:]
        if facts.teacher is not None:
            return cls._of_teacher(cast(Latents, facts.teacher), autoencoder)
        size, shape, grey = min(sides), autoencoder.shape_of(*sides)[1:], facts.shape[0] == GREY
        if not (autoencoder.encodes_in_step and (facts.cropped or facts.augmentation)):
            return cls(autoencoder, size, shape, grey=grey)  # other pictures are the same in each step
        return LatentsInStep(
            autoencoder, size, shape, grey=grey, horizontal_flip=facts.mirrored, augmentation=facts.augmentation
        )

    @classmethod
    def _of_teacher(cls, teacher: "Latents", autoencoder: Autoencoder) -> "Latents":
        """Return the space of the stored latents that a teacher generates."""
        if teacher.autoencoder.fingerprint != autoencoder.fingerprint:
            raise UsageError(f"`autoencoder` {autoencoder.name} is not the teacher's autoencoder: leave it out")
        # The folder of the autoencoder may have moved since the teacher was trained.
        scale = {"mean": teacher.mean, "std": teacher.std}
        return Latents(autoencoder, teacher.image_size, teacher.shape, grey=teacher.grey, **scale)

    @property
    @override
    def medium(self) -> "EncodedPictures":
        return EncodedPictures(self)

    @override
    def decode(self, x: Tensor) -> Tensor:
        parts = self.unscaled(x).split(self._at_once(x.device))
        pictures = torch.cat([self.autoencoder.decode(part) for part in parts])
        return self.pixels.decode(pictures.mean(dim=1, keepdim=True) if self.grey else pictures)

    def latents_of(self, pictures: Tensor) -> Tensor:
        """Encode stored pictures some at a time, as a single variant ``[b, 1, k, c, h, w]``."""
        parts = self.pixels.encode(pictures).expand(-1, RGB, -1, -1).split(self._at_once(pictures.device))
        encoded = [self.autoencoder.encode(part) for part in parts]
        return torch.cat([torch.stack([each for each in pair if each is not None], dim=1) for pair in encoded])[:, None]

    def _at_once(self, device: torch.device) -> int:
        pixels = self.autoencoder.pixels_at_once.get(device.type, PIXELS_AT_ONCE)
        return max(1, pixels // math.prod((self.pixels.shape or ())[1:]))


def autoencoder_of(part: Sequence[str]) -> Autoencoder:
    """Return an autoencoder by its words: a registered one with its arguments, or that of a folder or hub id."""
    name, options = split_part(part)
    words = ["Small" if name == "small" else name, *options]
    if options or words[0] in names(Autoencoder):
        return choose("autoencoder", Autoencoder, words).build()
    return PretrainedAutoencoder(name)


class EncodedPictures(Pictures):
    """Pictures that an autoencoder encodes, so that a store holds their latents."""

    space: Latents

    @property
    @override
    def picture_shape(self) -> tuple[int, ...]:
        return self.space.pixels.medium.picture_shape

    @property
    @override
    def noun(self) -> str:
        return f"{super().noun} by {self.space.autoencoder.name}"

    @override
    def stored(self, data: Tensor) -> Tensor:
        return self.space.latents_of(data)

    @property
    @override
    def codec(self) -> str:
        return key_of(self.space.autoencoder.fingerprint)

    @override
    def reconstructed(self, pictures: Tensor) -> Tensor:
        space = self.space
        return self.render(space.decode(space.encode(self.stored(pictures))))

    @override
    def rows(self, dataset: Any, *, mirrored: bool, recorded: Space | None = None) -> tuple[Any, Space]:
        """Return the latents of all pictures and of their sources, and the space with the scales of the latents."""
        autoencoder, source = self.space.autoencoder, dataset.source
        latents = encode_pictures(ImageDataset(dataset.path), autoencoder, mirrored=mirrored)
        source = source and encode_pictures(source, autoencoder, mirrored=mirrored)
        space = cast(Latents, latents.space)
        space.autoencoder = autoencoder  # its folder may have moved since the latents were stored
        same = {name: getattr(dataset, name) for name in ("rows", "partners", "columns", "seed")}
        return latents.changed(source=source, **same), space

    @override
    def has_rows(self, store: Path, *, mirrored: bool) -> bool:
        return writer_of(ImageDataset(store), self.space.autoencoder, mirrored=mirrored).is_whole

    @override
    def prepare(self, device: torch.device, autoencoder: str | None = None) -> None:
        known = self.space.autoencoder
        if autoencoder is not None:
            if not isinstance(known, PretrainedAutoencoder):
                super().prepare(device, autoencoder)
            self.space.autoencoder = PretrainedAutoencoder(autoencoder, known.fingerprint)
        self.space.autoencoder.prepare(device)

    @override
    def decoders(self) -> dict[str, nn.Module]:
        return {"decoder": Decoder(self.space)}


class Decoder(nn.Module):
    """The decoder of a space of latents as a module, called with ``x``."""

    def __init__(self, space: Latents) -> None:
        super().__init__()
        self.autoencoder, self.grey = space.autoencoder, space.grey
        self.autoencoder.prepare(torch.device("cpu"))
        shape = (-1, *[1] * (len(space.shape or ()) - 1))
        self.mean, self.std = (torch.tensor(scale).reshape(shape) for scale in (space.mean, space.std))

    @override
    def forward(self, x: Tensor) -> Tensor:
        pictures = self.autoencoder.decode(x * self.std + self.mean)
        return pictures.mean(dim=1, keepdim=True) if self.grey else pictures


LATENTS_FILE = "latents.float16"
LATENTS_VERSION = 3
BATCH_SIZE = 16
ROWS_AT_ONCE = 256


class LatentDataset(StoreDataset):
    """The latents of a store: items have ``latents``, float16 ``[v, k, c, h, w]``, as :class:`Latents` takes them."""

    @property
    @override
    def description(self) -> str:
        shape = " x ".join(map(str, self.info.rows[LATENTS_FILE][2:]))
        return f"{super().description}, as latents of {shape} by {cast(Latents, self.space).autoencoder.name}"


def channel_scales(file: Path, length: int, shape: Sequence[int]) -> tuple[list[float], list[float]]:
    """Measure mean and standard deviation of each channel of stored latents.

    The file has ``length`` rows ``[v, k, c, h, w]``. The first variant alone counts, so that the scales are the same
    with mirror images and without.
    """
    rows = mapped(file, (length, *shape))
    sums = np.zeros((2, shape[2]))
    for start in range(0, length, ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE, 0].astype(np.float64)
        sums[0] += some[:, 0].sum(axis=(0, 2, 3))
        sums[1] += (some**2).sum(axis=(0, 1, 3, 4))  # squares of the mean and, unless deterministic, of the std
    mean, square = (sums / (length * shape[3] * shape[4])).tolist()
    return scales_of(mean, square)


def scales_of(mean: Sequence[float], square: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, to 4 digits, from the means of values and of squares."""
    std = (max(s - m**2, 0.0) ** 0.5 for m, s in zip(mean, square, strict=True))
    return [float(f"{m:.4g}") for m in mean], [float(f"{s:.4g}") or 1.0 for s in std]


def encode_pictures(pictures: ImageDataset, autoencoder: Autoencoder, *, mirrored: bool) -> LatentDataset:
    """Encode images by all processes together, unless their latents are stored already. Collective.

    Another run that encodes the same images is waited for. Encoding resumes after a kill.

    Args:
        pictures: images of a store.
        autoencoder: autoencoder, the same on all processes.
        mirrored: encode the mirror images, too.

    Raises:
        UsageError: if the images do not suit the autoencoder, or the folder of the store cannot be written.
    """
    info, state = pictures.info, join_processes()
    framing = info.framing or Framing(info.image_size, info.image_size)
    shape = autoencoder.shape_of(*framing.shape[1:])[1:]
    space = Latents(autoencoder, info.image_size, shape, grey=framing.grey)
    writer = writer_of(pictures, autoencoder, mirrored=mirrored)

    @torch.no_grad()
    def make(numbers: Sequence[int]) -> Mapping[str, Tensor]:
        images = pictures.read_batch(numbers)["images"].to(state.device)
        variants = [images, images.flip(-1)][: 1 + mirrored]
        return {"latents": torch.cat([space.latents_of(each) for each in variants], dim=1).half()}

    def document() -> dict[str, object]:
        mean, std = channel_scales(writer.stage / LATENTS_FILE, writer.length, writer.shapes[LATENTS_FILE])
        described = describe(space) | {"mean": mean, "std": std}
        more = {name: getattr(info, name) for name in ("source", "image_size", "class_names")}
        more |= {"space": described, "pictures": pictures.fingerprint, "framing": asdict(framing)}
        return {"labels": pictures.labels, **more}

    with claimed(writer) as is_missing:
        if is_missing:
            fill(writer, make, document, batch_size=BATCH_SIZE)
    return LatentDataset(writer.path, pictures.described)


def writer_of(pictures: ImageDataset, autoencoder: Autoencoder, *, mirrored: bool) -> StoreWriter:
    """Return the store of the latents of images, which may be missing."""
    key = key_of(LATENTS_VERSION, pictures.fingerprint, autoencoder.fingerprint)
    path = pictures.path.with_name(f"{pictures.path.name}-latents-{key}{'-mirrored' * mirrored}")
    return StoreWriter(path, len(pictures), "latents")
