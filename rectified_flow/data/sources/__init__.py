"""The contract of a source of images, and the rows of a store that are made from its images."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from rectified_flow.data.census import Census, is_flat
from rectified_flow.data.framing import Framing
from rectified_flow.data.stream import spread
from rectified_flow.errors import UsageError
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.pictures import (
    decoded,
    framed,
    has_frames,
    is_grey,
    is_hazy,
    is_wholly_transparent,
    needed_bits,
    upright_size,
)

Row = np.ndarray[Any, np.dtype[Any]]
TRANSPARENT = "wholly transparent"
TOO_WIDE = "cropped to half of the area or less (`aspect_ratio` and `crop` none keep more)"
HAZY = "partly transparent in most of the area, so that white shows through (`alpha` keeps the fourth channel)"
FRAMES = "of a file with several pages or frames, of which one is read"
COLOURED = "coloured, and trained on in grey"
WHITE = "of one colour once white fills their transparent parts (`alpha` keeps the fourth channel)"
OPAQUE = 255
MIN_KEPT = 0.5  # share of the area of a picture up to which its crop is reported


class Fitted(NamedTuple):
    """The row of an image."""

    row: Row
    """``[c, h, w]``."""
    size: tuple[int, int]
    """Width and height of the image [px]."""
    remarks: tuple[str, ...] = ()
    """Properties of the image that a user should know about, as ends of "pictures are ..."."""


class PictureRows:
    """The rows of a store of pictures, uint8. Other data have rows of their own with these members."""

    def __init__(self, framing: Framing) -> None:
        self.framing, self.census = framing, Census()
        self.key: tuple[Any, ...] = ()

    def fit(self, image: Any) -> Fitted:
        """Return the row of a Pillow image that is not decoded yet."""
        size, framing = upright_size(image), self.framing
        is_nearest, several = framing.resize == "nearest", has_frames(image)
        is_brighter = (needed_bits(image) or 0) > framing.bits
        image = decoded(image, None if is_nearest else 2 * max(framing.stored_size), framing.bits)
        remarks = {
            TRANSPARENT: is_wholly_transparent(image),
            HAZY: not framing.alpha and is_hazy(image),
            FRAMES: several,
            TOO_WIDE: framing.kept(*size) <= MIN_KEPT,
            COLOURED: framing.grey and not is_grey(image),
            f"of more than {framing.bits} bits, so darker than the others": is_brighter,
        }
        is_shape = image.mode == "RGBA" and not framing.alpha
        mode = "L" if framing.grey else "RGBA" if framing.alpha else "RGB"
        row = framed(image, framing.stored_size, mode=mode, pad=framing.crop == "none", resize=framing.resize)
        planes = np.asarray(row)[None] if framing.grey else np.asarray(row).transpose(2, 0, 1)
        is_shape = is_shape and image.getchannel("A").getextrema()[0] < OPAQUE
        remarks[WHITE] = is_shape and is_flat(planes) and not remarks[TRANSPARENT]
        return Fitted(planes, size, tuple(text for text, applies in remarks.items() if applies))

    def add(self, row: Row, *, is_repeated: bool = False) -> None:
        """Take note of a row that is written, which may be equal to an earlier one."""
        self.census.add(row, is_repeated=is_repeated)

    def notes(self, names: Sequence[str]) -> list[str]:
        """Return sentences about the rows that were written, whose images have these names in their source."""
        return self.census.notes(names)

    def info(self, name: str, sizes: set[tuple[int, int]]) -> dict[str, Any]:
        """Return further entries of ``info.json`` for the rows of a source with images of some sizes [px]."""
        return {}


class ImageSource(ABC):
    """A source of images that are to be decoded into a store."""

    name: str
    """Display name: a hub id or a path."""
    fingerprint: str
    """A string that changes whenever the images change."""
    class_names: Sequence[str] = ()
    """Class names by label; empty if the images have no labels."""
    notes: Sequence[str] = ()
    """Sentences that a user should know about the images, such as which files are not read. A source may add to them
    until :meth:`column_names` has returned. Stores do not keep them, since the files may change between runs."""
    excluded: Collection[str] = frozenset()
    """Names of the images that are left out, as by :meth:`exclude`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def load(self, index: int) -> tuple[Any, int]:
        """Return an image, decoded or not, and its label (-1 for none). Any exception means a broken image."""

    def place_of(self, index: int) -> str:
        """Return words with which a user finds one image."""
        return f"row {index} of {self.name}"

    def name_of(self, index: int) -> str:
        """Return the name of one image among those of the source."""
        return str(index)

    def size_of(self, index: int) -> tuple[int, int]:
        """Return the width and height of one image [px]."""
        return upright_size(self.load(index)[0])

    def exclude(self, names: Collection[str]) -> None:
        """Leave out the images with some names, or in folders with these names.

        Raises:
            UsageError: if an image does not exist, or none is left.
        """
        self.excluded = excluded_among([self.name_of(index) for index in range(len(self))], names, self.name)
        self.notes = [*self.notes, note_on_excluded(self.excluded)]

    def numbers(self, limit: int | None = None) -> list[int]:
        """Return the numbers of the images that are not left out, or of ``limit`` images spread over them."""
        every = range(len(self))
        kept = [index for index in every if self.name_of(index) not in self.excluded] if self.excluded else [*every]
        return kept if limit is None else spread(kept, limit)

    def read_table(self) -> Mapping[str, Sequence[Any]]:
        """Return the columns beside the images, a value for each image."""
        return {}

    def column_names(self) -> list[str]:
        """Return the names of the columns; none, and a note, if the table is faulty, as training may not use it."""
        try:
            return [*self.read_table()]
        except UsageError as error:
            note = f"columns for conditions are not read: {error}"
            self.notes = [*self.notes, *[note] * (note not in self.notes)]
            return []

    @property
    def space(self) -> Space:
        """The space of the images as a store holds them; their scale may be unknown yet."""
        return Pixels()

    def rows(self, framing: Framing) -> PictureRows:
        """Return how the images become rows of a store."""
        return PictureRows(framing)


def excluded_among(names: Sequence[str], exclude: Collection[str], source: str) -> frozenset[str]:
    """Return the names of the images of a source that are excluded, by their own names or those of their folders.

    Raises:
        UsageError: if a name to exclude does not exist, or no image is left.
    """
    folders = {name: {*map(str, PurePath(name).parents)} for name in names}
    if unknown := sorted({*exclude} - {*names} - set[str]().union(*folders.values())):
        raise UsageError(f"`exclude` names {unknown[0]}, which is no image and no folder of {source}: correct the list")
    excluded = frozenset(name for name in names if name in exclude or not folders[name].isdisjoint(exclude))
    if excluded and len(excluded) == len({*names}):
        raise UsageError(f"`exclude` lists all images of {source}: list fewer images")
    return excluded


def note_on_excluded(excluded: Collection[str]) -> str:
    """Return a sentence about images that are excluded."""
    return f"left out {len(excluded):,} images by `exclude`"
