"""The medium of pictures, which spaces of pixels and of latents share."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from rectified_flow.registry import Document
from rectified_flow.spaces.medium import Medium, encoded

GREY, RGB, RGBA = 1, 3, 4
MODES = {GREY: "L", RGB: "RGB", RGBA: "RGBA"}
"""Pillow's mode for pictures by their number of channels."""
ENTRY = "images"  # the entry of a batch that holds pictures
ROUNDING = 0.01  # distance beyond [-1, 1] that rounding explains


class Pictures(Medium):
    """Pictures: RGB, RGBA, grey, or of more channels, whose first three are shown.

    Generated pictures are float32 in [0, 1].
    """

    items = "images"
    framed_by = ("bits", "pad", "resize")

    @property
    @override
    def picture_shape(self) -> tuple[int, ...]:
        shape = self.space.shape or ()
        return shape if shape[:1] in ((RGB,), (RGBA,), (GREY,)) else ()

    @property
    @override
    def input_suffixes(self) -> Collection[str]:
        from rectified_flow.system.pictures import IMAGE_SUFFIXES  # loads Pillow, which model code does without

        return IMAGE_SUFFIXES if self.picture_shape else ()

    @property
    @override
    def noun(self) -> str:
        shape = self.picture_shape or self.space.shape
        if shape is None:
            return "images"
        channels, height, width = shape
        size = str(width) if width == height else f"{width}x{height}"
        return f"{size} px" + " with transparency" * (channels == RGBA) + " in grey" * (channels == GREY)

    @override
    def render(self, data: Tensor) -> Tensor:
        if data.shape[1] == RGBA:  # over white
            colours, alpha = data.split((RGB, 1), dim=1)
            data = torch.lerp(torch.ones_like(colours), colours, alpha)
        pictures = to_uint8(data)
        return pictures.expand(-1, 3, -1, -1) if pictures.shape[1] == 1 else pictures[:, :RGB]

    @override
    def contents(self, data: Tensor) -> Tensor:
        return to_uint8(data) if data.shape[1] == RGBA else self.render(data)

    @override
    def files(self, content: Tensor, **options: object) -> dict[str, bytes]:
        return {".png": encoded(content, **options)}

    @override
    def read(self, file: Path, *, bits: int = 16, pad: bool = False, resize: str = "lanczos") -> Tensor:
        """Read a picture in the size of the space.

        Args:
            file: the file.
            bits: number of bits of the values in files of 16 bits.
            pad: show the whole picture, padded with white, instead of cropping its centre.
            resize: name of Pillow's filter.
        """
        from torchvision.transforms.functional import pil_to_tensor

        from rectified_flow.system.pictures import decoded, framed, open_picture

        channels, height, width = self.picture_shape
        picture = decoded(open_picture(file), 2 * max(width, height), bits)
        return pil_to_tensor(framed(picture, (width, height), mode=MODES[channels], pad=pad, resize=resize))

    @override
    def size_of(self, file: Path) -> tuple[int, int]:
        from rectified_flow.system.pictures import open_picture, upright_size

        return upright_size(open_picture(file))

    @override
    def misfit(self, other: Medium) -> str | None:
        differ = f"is read at {other.noun}, and the flow was trained at {self.noun}: pass pictures of that size"
        return differ if self.picture_shape and other.sides != self.sides else None

    @override
    def page(self) -> Document:
        return {}

    @override
    def problem_with(self, batch: Mapping[str, Tensor]) -> str | None:
        """Return a warning about pictures that are smaller than samples, or whose values are out of range.

        Floating-point pictures must be in [-1, 1]. Those without negative values, as from ``ToTensor``, are reported.
        """
        if ENTRY not in batch:
            return None
        sides, wanted = tuple(batch[ENTRY].shape[-2:]), tuple(self.picture_shape[-2:])
        if any(side < least for side, least in zip(sides, wanted, strict=False)):
            return f"images of {sides} are smaller than samples, which are {wanted}: pass the `shape` of the images"
        if batch[ENTRY].dtype == torch.uint8:
            return None
        least, most = (float(value) for value in batch[ENTRY].aminmax())
        if -1 - ROUNDING <= least < 0 and most <= 1 + ROUNDING:
            return None
        return f"images reach from {least:.3g} to {most:.3g}; scale floating-point images to [-1, 1], or store uint8"


def to_uint8(data: Tensor) -> Tensor:
    """Return pictures in [0, 1] as uint8."""
    return data.mul(255).round().to(torch.uint8)
