"""The framing of the training pictures: their size, channels, crop and resampling."""

import fractions
import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from annotated_types import Gt

from rectified_flow.errors import UsageError
from rectified_flow.system.terminal import size_text

Crop = Literal["center", "random", "none"]
Resize = Literal["lanczos", "nearest"]
Bits = Literal[8, 10, 12, 14, 16]
Side = Annotated[int, Gt(0)]
MARGIN = 1.25  # sides of a stored image from which random parts are cropped, as multiples of the sides of the parts


@dataclass(frozen=True)
class Framing:
    """Size, channels and crop of the training pictures.

    Args:
        width: width of the network's input [px].
        height: height of the network's input [px].
        alpha: keep transparency, as a fourth channel.
        crop: the centre, a random part at each step, or nothing: the whole picture is padded.
        grey: keep the brightness alone, as a single channel.
        resize: filter that resizes the pictures: ``nearest`` makes no new colours.
        bits: number of bits of the values in files of 16 bits.
    """

    width: Side
    height: Side
    alpha: bool = False
    crop: Crop = "center"
    grey: bool = False
    resize: Resize = "lanczos"
    bits: Bits = 16

    @classmethod
    def of(
        cls,
        image_size: int,
        aspect_ratio: str = "1:1",
        *,
        alpha: bool = False,
        crop: Crop = "center",
        grey: bool = False,
        resize: Resize = "lanczos",
        bits: Bits = 16,
    ) -> Self:
        """Build the framing by the short side, the ratio of width to height, and the other fields."""
        width, height = parse_ratio(aspect_ratio)
        short = min(width, height)
        times, rest = divmod(image_size, short)
        if rest:
            given = f"`image_size` {image_size} with `aspect_ratio` {aspect_ratio}"
            raise UsageError(f"{given} gives a fractional long side; pass a multiple of {short}")
        return cls(width * times, height * times, alpha, crop, grey, resize, bits)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(c, h, w)`` of the network's input."""
        return 1 if self.grey else 3 + self.alpha, self.height, self.width

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height of a row of the store [px]."""
        margin = MARGIN if self.crop == "random" else 1
        return round(margin * self.width), round(margin * self.height)

    @property
    def size_text(self) -> str:
        """``64``, or ``96x64``."""
        return size_text(self.width, self.height)

    def enlarges(self, width: int, height: int) -> bool:
        """Return whether an image of this size would be enlarged when it is stored."""
        smaller = [given < stored for given, stored in zip((width, height), self.stored_size, strict=True)]
        return all(smaller) if self.crop == "none" else any(smaller)

    def kept(self, width: int, height: int) -> float:
        """Return the share of the area of an image of this size that is stored."""
        if self.crop == "none":
            return 1.0
        ratio = width * self.height / (height * self.width)
        return min(ratio, 1 / ratio)


def parse_ratio(text: str) -> tuple[int, int]:
    """Parse ``width:height``, such as ``3:2``, and return both numbers in lowest terms."""
    match = re.fullmatch("([1-9][0-9]{0,3}):([1-9][0-9]{0,3})", text)
    if match is None:
        rule = "it must be width:height, two whole numbers from 1 to 9999, such as 3:2"
        raise UsageError(f"`aspect_ratio` is {text}; {rule}")
    return fractions.Fraction(int(match[1]), int(match[2])).as_integer_ratio()
