"""The framing of the training pictures: their size, channels and crop."""

import fractions
import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from annotated_types import Gt

from rectified_flow.errors import UsageError
from rectified_flow.system.terminal import size_text

Crop = Literal["center", "random", "none"]
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
    """

    width: Side
    height: Side
    alpha: bool = False
    crop: Crop = "center"

    @classmethod
    def of(cls, image_size: int, aspect_ratio: str = "1:1", *, alpha: bool = False, crop: Crop = "center") -> Self:
        """Build the framing from the values of flags; ``image_size`` is the short side."""
        width, height = parse_ratio(aspect_ratio)
        short = min(width, height)
        times, rest = divmod(image_size, short)
        if rest:
            given = f"`image_size` {image_size} with `aspect_ratio` {aspect_ratio}"
            raise UsageError(f"{given} gives a fractional long side; pass a multiple of {short}")
        return cls(width * times, height * times, alpha, crop)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(c, h, w)`` of the network's input."""
        return 3 + self.alpha, self.height, self.width

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


def parse_ratio(text: str) -> tuple[int, int]:
    """Parse ``width:height``, such as ``3:2``, and return both numbers in lowest terms."""
    match = re.fullmatch("([1-9][0-9]{0,3}):([1-9][0-9]{0,3})", text)
    if match is None:
        rule = "it must be width:height, two whole numbers from 1 to 9999, such as 3:2"
        raise UsageError(f"`aspect_ratio` is {text}; {rule}")
    return fractions.Fraction(int(match[1]), int(match[2])).as_integer_ratio()
