"""A folder of fields: measured values in files, with or without a subfolder per class."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from rectified_flow.data.framing import Framing
from rectified_flow.data.sources import Fitted, PictureRows, Row
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.kinds import OTHER_FORMATS
from rectified_flow.data.sources.listing import is_image
from rectified_flow.errors import UsageError, first_line
from rectified_flow.measurements import files as field_files
from rectified_flow.measurements.files import FIELD_SUFFIXES, Array, FieldFormat, StoreBits, fit_field
from rectified_flow.measurements.medium import default_show
from rectified_flow.measurements.space import Fields
from rectified_flow.registry import Document, describe, register
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import IMAGE_SUFFIXES

SAMPLED = 256  # number of pictures whose headers decide whether a folder holds measurements


class FieldRows(PictureRows):
    """The rows of a store of measurements, in their own type, with the range of their values."""

    def __init__(self, framing: Framing, space: Fields) -> None:
        super().__init__(framing)
        self.space, channels = space, space.files["channels"]
        stored = f"images.{space.dtype}", (channels, *framing.stored_size[::-1])
        self.key = ("space", stored, tuple(space.files.values()))
        self.low, self.high, self.has_missing = np.full(channels, np.inf), np.full(channels, -np.inf), False

    @override
    def fit(self, image: Array) -> Fitted:
        with np.errstate(over="ignore"):
            row = fit_field(image, self.framing.stored_size, pad=self.framing.crop == "none").astype(self.space.dtype)
        if np.isinf(row).any():
            raise ValueError(f"it holds an infinite value, or one too large for {self.space.dtype}; write NaN instead")
        return Fitted(row, (image.shape[2], image.shape[1]))

    @override
    def add(self, row: Row, *, is_repeated: bool = False) -> None:
        self.has_missing |= bool(np.isnan(row).any())
        self.low = np.fmin(self.low, np.fmin.reduce(row, axis=(1, 2)))  # leaves out NaN
        self.high = np.fmax(self.high, np.fmax.reduce(row, axis=(1, 2)))

    @override
    def info(self, name: str, sizes: set[tuple[int, int]]) -> Document:
        constant = np.flatnonzero(~(self.low < self.high)) + 1
        if len(constant):
            raise UsageError(f"channel {constant[0]} of {name} has one value, or none: remove it from the files")
        # The size of a pixel, a tag of the files, is no longer true if fields are resized.
        files = self.space.files | ({} if sizes == {self.framing.stored_size} else {"pixel_size": None})
        space = replace(
            self.space,
            shape=(len(self.low), *self.framing.shape[1:]),
            low=self.low.tolist(),
            high=self.high.tolist(),
            files=files,
            has_missing=self.has_missing,
        )
        return {"space": describe(space)}


@register(role="reader")
class FieldFolder(FileFolder):
    """All fields below ``path``, of one type and number of channels; see :class:`FileFolder` for their classes.

    The first file that can be read decides. A file that differs counts as broken when it is loaded.

    Args:
        path: the folder.
        channels_last: whether arrays of three axes are ``[h, w, c]`` rather than ``[c, h, w]``; None to decide it by
            the shape of the first.
        store_bits: most bits of a stored value: 16 rounds floats and 32-bit integers to float16.
        options: further arguments of :class:`FileFolder`.
    """

    suffixes, other_suffixes = FIELD_SUFFIXES, (IMAGE_SUFFIXES | OTHER_FORMATS) - FIELD_SUFFIXES
    kind, space_name = "fields", Fields.__name__

    def __init__(
        self, path: Path, *, channels_last: bool | None = None, store_bits: StoreBits = 32, **options: Any
    ) -> None:
        super().__init__(path, **options)
        values, self.format, file_type = self._first_field(channels_last)
        if len(self.files) == 1 and self.format.suffix == ".npy" and channels_last is None:
            self._refuse_alone(values)
        self._types = self.format.dtype, file_type
        if self.format.suffix == ".npy" and not self.format.two_dimensional:
            channels_last = self.format.channels_last
        self.channels_last, self.store_bits = channels_last, store_bits
        _, height, width = values.shape
        self._size = width, height
        self.notes.append(f"read {self.format.suffix} files as {self.format}, {width} x {height} px")
        self.fingerprint = f"{self.fingerprint} fields {channels_last}"

    @override
    def read(self, file: Path) -> Array:
        values, found, _ = field_files.read_field(file, self.channels_last)
        # A file without a mark for unknown values is read like the first, which has one.
        if found.channels != self.format.channels or found.dtype not in self._types:
            raise ValueError(f"it has {found}, and the first file has {self.format}")
        return values.astype(self.format.dtype)

    @override
    def size_of(self, index: int) -> tuple[int, int]:
        """Return the width and height of the first field [px]; the other files are assumed to have the same size."""
        return self._size

    @override
    def rows(self, framing: Framing) -> FieldRows:
        return FieldRows(framing, self.space)

    @property
    @override
    def space(self) -> Fields:
        """The space of stored fields; their size and range, which are not known yet, suit every transform."""
        low, high, how = (1.0,) * self.format.channels, (2.0,) * self.format.channels, self.format
        dtype = field_files.stored_type(how.dtype, self.store_bits)
        return Fields((len(low), 1, 1), low, high, dtype=dtype, show=default_show(how), files=asdict(how))

    @classmethod
    def claim(cls, files: Sequence[Path]) -> tuple[bool, list[Path]]:
        """Return whether most files of a folder are measurements, by the headers of some, and some measurements."""
        pictures = [*filter(is_image, files)]
        sampled = pictures[:: 1 + len(pictures) // SAMPLED]
        measured = [*filter(field_files.is_measured, sampled)]
        arrays = sum(file.suffix.lower() == ".npy" for file in files)
        return arrays > len(pictures) or 2 * len(measured) > len(sampled), measured

    def _refuse_alone(self, values: Array) -> None:
        """Refuse the only array of the folder if it is more likely a stack of fields than one field ``[c, h, w]``."""
        try:
            field_files.refuse_stack(
                np.moveaxis(values, 0, 2).shape if self.format.channels_last else values.shape, is_alone=True
            )
        except ValueError as error:
            raise UsageError(f"{printable(self.files[0])} may be a stack ({error})") from error

    def _first_field(self, channels_last: bool | None) -> tuple[Array, FieldFormat, str]:
        """Return the first field that can be read."""
        problems = list[str]()
        for file in self.files:
            try:
                return field_files.read_field(file, channels_last)
            except ImportError:  # a package is missing
                raise
            except Exception as error:  # decoders raise exceptions of many types
                problems.append(f"{printable(file)} ({first_line(error)})")
        raise UsageError(f"the folder {self.path} holds no field that can be read; the first is {problems[0]}")
