"""Pixels: pictures as a dataset stores them, uint8, and as a flow works on them, in [-1, 1]."""

from collections.abc import Sequence
from math import log2
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.errors import UsageError
from rectified_flow.registry import register
from rectified_flow.spaces.augmentation import augmented
from rectified_flow.spaces.pictures import Pictures, to_uint8
from rectified_flow.spaces.space import DataFacts, Shape, Space, dequantised

LEVEL = 1 / 127.5  # distance of two levels of 8 bits in [-1, 1]


@register
class Pixels(Space):
    """Pictures ``[b, c, h, w]``.

    Stored pictures are uint8, or floating point in [-1, 1]. Generated ones are float32 in [0, 1]. Four channels are
    RGBA, not premultiplied. If stored pictures are larger than the given ``shape``, training crops random parts. Other
    uses crop the centre.

    Args:
        shape: ``(c, h, w)``; taken from the first training batch if not given.
        horizontal_flip: mirror half of the training pictures.
        augmentation: probability of each change to a training picture (:mod:`rectified_flow.spaces.augmentation`),
            which the network takes as a condition; 0 for none.

    Raises:
        UsageError: from :meth:`augment`, if the data are not pictures ``[b, c, h, w]``.
    """

    uses = ("augmentation",)

    def __init__(self, shape: Shape | None = None, *, horizontal_flip: bool = False, augmentation: float = 0.0) -> None:
        self.shape = None if shape is None else tuple(shape)
        self.horizontal_flip, self.augmentation = horizontal_flip, augmentation

    @classmethod
    @override
    def of(cls, facts: DataFacts, /) -> Self:
        return cls(facts.shape, horizontal_flip=facts.mirrored, augmentation=facts.augmentation)

    @property
    @override
    def medium(self) -> Pictures:
        return Pictures(self)

    @override
    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        if data.ndim != 4:
            found = f"`space` Pixels is for pictures [b, c, h, w], and the data have the shape {list(data.shape)}"
            raise UsageError(f"{found}: pass items [c, h, w], or a `space` of your own")
        data = cropped(data, self.shape, at_random=True)
        data = mirrored(data) if self.horizontal_flip else data
        if not self.augmentation:
            return data, {}
        # Sources are floating point, and may have unknown pixels.
        unknown = data.is_floating_point()
        x, numbers = augmented(self.encode(data), self.augmentation, has_missing=unknown)
        return x, {"augmentation": numbers}

    @override
    def encode(self, data: Tensor) -> Tensor:
        data = cropped(data, self.shape)
        return data.float() / 127.5 - 1 if data.dtype == torch.uint8 else data.float()

    @override
    def decode(self, x: Tensor) -> Tensor:
        return x.float().add(1).div(2).clamp(0, 1)

    @override
    def to_stored(self, x: Tensor, *, exact: bool = False) -> Tensor:
        return x.float() if exact else to_uint8(self.decode(x))


@dequantised.register
def _(space: Pixels, data: Tensor) -> tuple[Tensor, Tensor | float]:
    """Draw each value uniformly within its level (Theis et al. 2015, arXiv:1511.01844)."""
    x = space.encode(data)
    return x + LEVEL * (randomness.rand("dequantisation", x.shape, x.device) - 0.5), log2(LEVEL)


def cropped(data: Tensor, shape: Sequence[int] | None, *, at_random: bool = False) -> Tensor:
    """Crop data that are larger than the shape, at the centre or at random; return others unchanged."""
    height, width = (data.shape if shape is None else shape)[-2:]
    high, wide = data.shape[-2] - height, data.shape[-1] - width
    if min(high, wide) < 0 or high == wide == 0:
        return data
    if not at_random:
        return data[..., high // 2 : high // 2 + height, wide // 2 : wide // 2 + width]
    rows, channels = (torch.arange(size, device=data.device) for size in data.shape[:2])
    top = randomness.randint("crop, top", high + 1, (len(data),), data.device)
    left = randomness.randint("crop, left", wide + 1, (len(data),), data.device)
    y = top[:, None] + torch.arange(height, device=data.device)
    x = left[:, None] + torch.arange(width, device=data.device)
    return data[rows[:, None, None, None], channels[:, None, None], y[:, None, :, None], x[:, None, None, :]]


def mirrored(data: Tensor) -> Tensor:
    """Mirror half of the rows ``[b, c, h, w]``."""
    chosen = randomness.rand("horizontal flip", (len(data), 1, 1, 1), data.device) < 0.5
    return torch.where(chosen, data.flip(-1), data)
