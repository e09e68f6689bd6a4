"""How a picture becomes a row of a store: its size, its channels, and what is cropped. Imports no torch."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal, Self

from annotated_types import Gt

from rectified_flow.errors import UsageError
from rectified_flow.system.terminal import size_text

Crop = Literal["center", "random", "none"]
Side = Annotated[int, Gt(0)]
HALVED = 8  # error messages propose sizes whose sides are multiples of this, so that networks of up to four levels fit
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
        """Build the framing from the values of flags; ``image_size`` is the short side.

        Raises:
            UsageError: if ``aspect_ratio`` is not WIDTH:HEIGHT, or the long side is not an integer.
        """
        width, height = parse_ratio(aspect_ratio)
        short = min(width, height)
        times, rest = divmod(image_size, short)
        if rest:
            multiple = short * HALVED
            nearest = max(1, round(image_size / multiple)) * multiple
            refusal = f"--image_size {image_size} with --aspect_ratio {aspect_ratio} gives a fractional long side"
            raise UsageError(f"{refusal}; pass {nearest}")
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
        wide, high = self.stored_size
        too_narrow, too_low = width < wide, height < high
        return too_narrow and too_low if self.crop == "none" else too_narrow or too_low


def parse_ratio(text: str) -> tuple[int, int]:
    """Return width and height, without common divisors, of ``3:2``.

    Raises:
        UsageError: if the text is not a ratio.
    """
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text)
    width, height = (int(number) for number in match.groups()) if match else (0, 0)
    rule = "it must be width:height, two whole numbers from 1 to 9999, such as 3:2"
    if min(width, height) <= 0:
        raise UsageError(f"--aspect_ratio is {text}; {rule}")
    return Fraction(width, height).as_integer_ratio()
