"""Latents in the step: stored pictures, which each training step augments and encodes."""

from collections.abc import Sequence
from copy import copy
from math import ceil
from pathlib import Path
from typing import Self, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor
from typing_extensions import override

from rectified_flow.condition import Values
from rectified_flow.data.store import StoreDataset
from rectified_flow.distributed import on_main
from rectified_flow.latents.autoencoders import Autoencoder
from rectified_flow.latents.space import EncodedPictures, Latents, scales_of
from rectified_flow.registry import register
from rectified_flow.spaces.pictures import ENTRY
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Shape, Space, with_augmentation

D = TypeVar("D", bound=StoreDataset)
AT_ONCE = 64
MEASURED = 512  # largest number of pictures whose latents are measured, in less than 2 s on one core at 128 px


@register
class LatentsInStep(Latents):
    """Latents ``[b, c, h, w]`` of pictures that an autoencoder encodes in each training step.

    Stored data are pictures, as :class:`Pixels` takes them. Training crops, mirrors and augments them as pixels before
    they are encoded. Each channel has about mean 0 and standard deviation 1.

    Args:
        autoencoder: autoencoder that returns no standard deviations.
        image_size: short side of the pictures [px].
        shape: shape ``(c, h, w)`` of the latents; by default, that of the latents of a square picture.
        grey: whether the pictures are grey, see :class:`Latents`.
        horizontal_flip: mirror half of the training pictures.
        augmentation: probability of each change to a training picture, see :class:`Pixels`; 0 for none.
        scale: ``mean`` and ``std`` of each channel.
    """

    key = ENTRY
    uses = ("autoencoder", "augmentation")

    def __init__(
        self,
        autoencoder: Autoencoder,
        image_size: int,
        shape: Shape | None = None,
        *,
        grey: bool = False,
        horizontal_flip: bool = False,
        augmentation: float = 0.0,
        **scale: Sequence[float],
    ) -> None:
        super().__init__(autoencoder, image_size, shape, grey=grey, **scale)
        self.horizontal_flip, self.augmentation = horizontal_flip, augmentation
        self.pixels = Pixels(self.pixels.shape, horizontal_flip=horizontal_flip)

    @property
    @override
    def medium(self) -> "PicturesInStep":
        return PicturesInStep(self)

    @override
    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        return with_augmentation(self.pixels, self.augmentation).augment(data)

    @override
    def encode(self, data: Tensor) -> Tensor:
        return super().encode(self.latents_of(data))

    @override
    def to_stored(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return self.pixels.to_stored(self.decode(x) * 2 - 1, exact=exact)

    def scaled(self, mean: list[float], std: list[float]) -> Self:
        """Return a space with this mean and standard deviation of each channel."""
        changed = copy(self)
        changed.mean, changed.std, changed._placed = mean, std, {}
        return changed


class PicturesInStep(EncodedPictures):
    """Pictures that a store holds, and that each training step encodes."""

    space: LatentsInStep

    @override
    def stored(self, data: Tensor) -> Tensor:
        return data

    @override
    def rows(self, dataset: D, *, mirrored: bool, recorded: Space | None = None) -> tuple[D, Space]:
        """Return the pictures themselves, and the space with the recorded scale, or that of a sample of them."""
        if isinstance(recorded, LatentsInStep):
            return dataset, self.space.scaled(list(recorded.mean), list(recorded.std))
        return dataset, self.space.scaled(*on_main(PartialState(), lambda: self._scales(dataset)))

    @override
    def has_rows(self, store: Path, *, mirrored: bool) -> bool:
        return True

    @torch.no_grad()
    def _scales(self, dataset: StoreDataset) -> tuple[list[float], list[float]]:
        """Measure mean and standard deviation of each channel of the latents of pictures spread over a dataset."""
        sums = torch.zeros(2, *(self.space.shape or ())[:1], dtype=torch.float64)
        chosen = range(0, len(dataset), ceil(len(dataset) / MEASURED))
        for first in range(0, len(chosen), AT_ONCE):
            images = dataset.read_batch(chosen[first : first + AT_ONCE])[self.space.key]
            latents = self.space.latents_of(images.to(PartialState().device))[:, 0, 0].cpu().double()  # not on MPS
            sums = sums + torch.stack([(latents**power).mean(dim=(2, 3)).sum(dim=0) for power in (1, 2)])
        mean, square = (sums / len(chosen)).tolist()
        return scales_of(mean, square)
