"""A survey of some pictures of a source, decoded before all others: how pictures of their kind are to be framed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rectified_flow.data.framing import Bits, Framing, Resize
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.stream import spread
from rectified_flow.system.machine import processors
from rectified_flow.system.pictures import decoded, is_grey, needed_bits, over_white

SURVEYED = 64  # number of pictures, spread over a source
FEW_COLOURS, PIXELS_A_COLOUR = 64, 16  # most colours of pixel art, and least number of its pixels for each colour
MOST_COLOURS = 4096  # number of colours above which a picture is no sprite that was enlarged
PURE = 0.5  # least share of single-coloured pixels, without those of the background, in a reduced label map
AGREEING = 0.9  # least share of pictures that decide for all of them


@dataclass(frozen=True)
class Facts:
    """The facts about one picture that its framing depends on."""

    is_grey: bool
    bits: int | None
    """Number of bits of the values in a file of 16 bits; None for other files."""
    is_nearest: bool | None
    """Whether a resized picture keeps its colours and edges with the filter ``nearest``; None without a preference."""


@dataclass(frozen=True)
class Survey:
    """The facts about some pictures of a source."""

    facts: Sequence[Facts]

    @property
    def is_grey(self) -> bool:
        """Whether all pictures are grey."""
        return bool(self.facts) and all(each.is_grey for each in self.facts)

    @property
    def bits(self) -> Bits:
        """The number of bits of the values in files of 16 bits."""
        most = max((each.bits for each in self.facts if each.bits is not None), default=16)
        return next(bits for bits in get_args(Bits) if bits >= most)

    @property
    def resize(self) -> Resize:
        """The filter that suits the pictures."""
        votes = [each.is_nearest for each in self.facts if each.is_nearest is not None]
        return "nearest" if votes and sum(votes) >= AGREEING * len(votes) else "lanczos"


def survey(source: ImageSource, framing: Framing, numbers: Sequence[int]) -> Survey:
    """Return the facts about some of the pictures with these numbers; a broken one is reported when all are decoded."""

    def examine(number: int) -> Facts | None:
        with suppress(Exception):  # decoders raise exceptions of many types
            return facts_of(source.load(number)[0], framing)
        return None

    some = spread(numbers, SURVEYED)
    with ThreadPoolExecutor(processors()) as pool:  # the decoder releases the GIL
        return Survey([facts for facts in pool.map(examine, some) if facts is not None])


def facts_of(image: Image.Image, framing: Framing) -> Facts:
    """Return the facts about a picture that is not decoded yet."""
    side = 2 * max(framing.stored_size) if image.format == "JPEG" else None
    bits = needed_bits(image)
    opened = decoded(image, side)
    is_nearest = False if image.format == "JPEG" else suits_nearest(over_white(opened), framing.stored_size)
    return Facts(is_grey(opened), bits, is_nearest)


def suits_nearest(image: Image.Image, size: tuple[int, int]) -> bool | None:
    """Return whether an image in RGB is pixel art or a label map that has to be resized without new colours.

    These are images of few colours that are enlarged, sprites that were enlarged by a whole number, and images of areas
    of one colour that are reduced. Returns None for an image of this size or of a single colour.
    """
    colours = image.getcolors(MOST_COLOURS)
    factor = max(size[0] / image.width, size[1] / image.height)
    if colours is None or factor == 1:
        return None if factor == 1 else False
    if len(colours) == 1:
        return None
    pixels = np.asarray(image)
    values = pixels[..., 0].astype(np.int32) << 16 | pixels[..., 1].astype(np.int32) << 8 | pixels[..., 2]
    block = _block_of(values)
    if factor * block >= 1 and block > 1:  # not smaller than the sprite
        return True
    if len(colours) > min(FEW_COLOURS, image.width * image.height / PIXELS_A_COLOUR):
        return False
    return factor > 1 or _purity(values, round(1 / factor)) >= PURE


def _block_of(values: NDArray[np.int32]) -> int:
    """Return the side of the blocks of one colour that an image ``[h, w]`` consists of."""
    rows = np.flatnonzero((values[1:] != values[:-1]).any(axis=1)) + 1
    columns = np.flatnonzero((values[:, 1:] != values[:, :-1]).any(axis=0)) + 1
    return gcd(*values.shape, *rows.tolist(), *columns.tolist())


def _purity(values: NDArray[np.int32], side: int) -> float:
    """Return the share of the fields ``[side, side]`` of an image that have one colour, without pure background."""
    height, width = (length // side * side for length in values.shape)
    blocks = values[:height, :width].reshape(height // side, side, width // side, side)
    fields = blocks.swapaxes(1, 2).reshape(-1, side * side)
    kinds, counts = np.unique(values, return_counts=True)
    is_pure = (fields == fields[:, :1]).all(axis=1)
    is_background = is_pure & (fields[:, 0] == kinds[counts.argmax()])
    return float(is_pure[~is_background].mean()) if (~is_background).any() else 1.0
