"""Pixels: pictures as a dataset stores them, uint8, and as a flow works on them, in [-1, 1]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.networks.conditions import Kinds, Told, Values
from rectified_flow.registry import register
from rectified_flow.spaces.augmentation import NUMBERS, augmented
from rectified_flow.spaces.space import Space

RGB = 3


@register
class Pixels(Space):
    """Pictures ``[b, c, h, w]``.

    Stored pictures are uint8, or floating point in [-1, 1]. Generated ones are float32 in [0, 1].

    Args:
        shape: ``(c, h, w)``; taken from the first training batch if not given.
        horizontal_flip: mirror half of the training pictures.
        augmentation: probability of each of the changes to a training picture that the network is told of, see
            :mod:`rectified_flow.spaces.augmentation`; with 0 it is told nothing.
    """

    def __init__(
        self, shape: Sequence[int] | None = None, *, horizontal_flip: bool = False, augmentation: float = 0.0
    ) -> None:
        self.shape = None if shape is None else tuple(shape)
        self.horizontal_flip, self.augmentation = horizontal_flip, augmentation

    @property
    def conditions(self) -> Kinds:
        return {"augmentation": Told(NUMBERS)} if self.augmentation else {}

    @property
    def picture_side(self) -> int | None:
        return self.shape[-1] if self.shape is not None and self.shape[0] == RGB else None

    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        """Each row mirrored left to right with probability 1/2, if that is asked for; then augmented."""
        if self.horizontal_flip:
            mirrored = randomness.rand("horizontal flip", (len(data), 1, 1, 1), data.device) < 0.5
            data = torch.where(mirrored, data.flip(-1), data)
        if not self.augmentation:
            return data, {}
        x, told = augmented(self.encode(data), self.augmentation)
        return x, {"augmentation": told}

    def encode(self, data: Tensor) -> Tensor:
        if data.dtype == torch.uint8:
            return data.float() / 127.5 - 1
        return data.float()

    def decode(self, x: Tensor) -> Tensor:
        """Float32 in [0, 1], values outside clipped."""
        return x.float().add(1).div(2).clamp(0, 1)

    def draw(self, data: Tensor) -> Tensor:
        """uint8; a single channel becomes grey, and channels after the third are left out."""
        pictures = data.mul(255).round().to(torch.uint8)
        return pictures.expand(-1, 3, -1, -1) if pictures.shape[1] == 1 else pictures[:, :3]

    def from_pictures(self, pictures: Tensor) -> Tensor:
        return pictures

    def to_stored(self, x: Tensor) -> Tensor:
        """uint8."""
        return self.draw(self.decode(x))

    def problem_with(self, data: Tensor) -> str | None:
        """Pictures that are not uint8 and outside [-1, 1], or in [0, 1] only, as ``ToTensor`` gives them."""
        if data.dtype == torch.uint8:
            return None
        least, most = (float(value) for value in data.aminmax())
        if not (least >= -1 and most <= 1):
            return (
                f"images reach from {least:.3g} to {most:.3g}; scale floating-point images to [-1, 1], or store uint8"
            )
        if least >= 0:
            return "the images of the first batch lie in [0, 1]; scale them to [-1, 1] (2 * x - 1), or store uint8"
        return None

    @property
    def noun(self) -> str:
        return f"{self.shape[-1]} px" if self.shape else "images"
