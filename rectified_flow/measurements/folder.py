"""A folder of fields: measured values in files, with or without a subfolder per class."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow.data.build import PictureRows, Row
from rectified_flow.data.framing import Framing
from rectified_flow.data.sources.folder import FileFolder, is_image
from rectified_flow.data.store import IMAGES_FILE, dtype_of
from rectified_flow.errors import UsageError, first_line
from rectified_flow.measurements.files import (
    FIELD_SUFFIXES,
    Array,
    FieldFormat,
    Header,
    StoreBits,
    is_measured,
    read_header,
    read_values,
    stored_type,
)
from rectified_flow.measurements.resizing import fit_field
from rectified_flow.measurements.space import Fields, default_show
from rectified_flow.registry import describe, register
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES

SAMPLED = 256
"""Number of pictures whose headers decide whether a folder holds measurements."""


class FieldRows(PictureRows):
    """The rows of a store of measurements, in their own type, with the range of their values."""

    def __init__(self, framing: Framing, how: FieldFormat, store_bits: StoreBits) -> None:
        super().__init__(framing)
        if framing.alpha:
            raise UsageError("--alpha is for pictures: measurements keep all channels; leave it out")
        self.format, self.dtype = how, stored_type(how.dtype, store_bits)
        self.file = f"{Path(IMAGES_FILE).stem}.{self.dtype}"
        self.shape = (how.channels, *framing.stored_size[::-1])
        self.key = ("space", (self.file, self.shape), astuple(how))
        self.low, self.high, self.missing = np.full(how.channels, np.inf), np.full(how.channels, -np.inf), 0

    def fit(self, image: Array) -> tuple[Row, tuple[int, int]]:
        """Return the row of a field ``[c, h, w]``, and its width and height [px].

        Raises:
            ValueError: if a value becomes infinite.
        """
        fitted, dtype = fit_field(image, self.framing.stored_size, pad=self.framing.crop == "none"), dtype_of(self.file)
        with np.errstate(over="ignore"):
            stored = fitted.astype(dtype)
        if np.isinf(stored).any():
            raise ValueError(f"its values reach {np.nanmax(np.abs(fitted)):.3g}, too large for {dtype.name}")
        return stored, (image.shape[2], image.shape[1])

    def add(self, row: Row) -> None:
        """Add the values of a row to the range of each channel."""
        flat = row.reshape(len(row), -1)
        unknown = np.isnan(flat)
        self.missing += int(unknown.sum())
        self.low = np.minimum(self.low, np.where(unknown, np.inf, flat).min(axis=1))
        self.high = np.maximum(self.high, np.where(unknown, -np.inf, flat).max(axis=1))

    def info(self, name: str, sizes: set[tuple[int, int]]) -> dict[str, Any]:
        """Return the space of the rows: the format of the files, and the range of the values.

        Raises:
            UsageError: if a channel has no known values, or a single one.
        """
        for number, (least, most) in enumerate(zip(self.low, self.high, strict=True), 1):
            if not least < most:
                found = "no known value" if least > most else f"the value {least:g} everywhere"
                raise UsageError(f"channel {number} of {name} has {found}: remove the channel from the files")
        # The size of a pixel, a tag of the files, is no longer true if fields are resized.
        kept = self.format if sizes == {self.framing.stored_size} else replace(self.format, pixel_size=None)
        space = stored_space(kept, self.dtype, self.framing, self.low.tolist(), self.high.tolist(), self.missing > 0)
        return {"space": describe(space)}


def stored_space(
    how: FieldFormat,
    dtype: str,
    framing: Framing,
    low: Sequence[float],
    high: Sequence[float],
    has_missing: bool = False,
) -> Fields:
    """Return the space of stored fields, with the range of their values."""
    shape, files = (how.channels, framing.height, framing.width), asdict(how)
    return Fields(shape, low, high, dtype=dtype, show=default_show(files), has_missing=has_missing, files=files)


@register(role="reader")
class FieldFolder(FileFolder):
    """All fields below ``path``, of one type and number of channels; see :class:`FileFolder` for their classes.

    The headers of all files are read at once. A file whose header cannot be read counts as broken when it is loaded.

    Args:
        path: the folder.
        channels_last: whether arrays of three axes are ``[h, w, c]`` rather than ``[c, h, w]``; None to decide it by
            the shape of the first.
        store_bits: most bits of a stored value: 16 rounds floats and 32-bit integers to float16.
        options: further arguments of :class:`FileFolder`.

    Attributes:
        format: how the files hold their fields.
        notes: lines on the shape of the arrays, on files that are not read, and on files without a class.

    Raises:
        UsageError: if the folder cannot be read or contains no fields, the files differ in type, channels or suffix,
            the axis of the channels is ambiguous, or a package is missing.
    """

    suffixes, other_suffixes = FIELD_SUFFIXES, (IMAGE_SUFFIXES | OTHER_SUFFIXES) - FIELD_SUFFIXES
    kind, space_name = "fields", Fields.__name__

    def __init__(
        self, path: Path, *, channels_last: bool | None = None, store_bits: StoreBits = 32, **options: Any
    ) -> None:
        super().__init__(path, **options)
        headers = self._read_headers(path)
        undecided = next((file for file, header in headers.items() if header.leaves_open), None)
        if undecided is not None:
            try:
                channels_last = headers[undecided].is_last(channels_last)
            except UsageError as error:
                raise UsageError(f"{printable(undecided)} is unclear: {error}") from error
        formats = {file: header.format(channels_last) for file, header in headers.items()}
        # Files without unknown values are read like those with a mark for them.
        self._types = {header.integers: header.dtype for header in headers.values() if header.integers}
        formats = {file: replace(each, dtype=self._types.get(each.dtype, each.dtype)) for file, each in formats.items()}
        _check_agreement(formats)
        first, sizes = next(iter(headers)), {each.pixel_size for each in formats.values()}
        self.channels_last, self.store_bits = channels_last, store_bits
        self.format = replace(formats[first], pixel_size=sizes.pop() if len(sizes) == 1 else None)
        shown = undecided or first
        width, height = headers[shown].size(channels_last)
        self.notes.append(
            f"read {self.format.suffix} files of shape {headers[shown].shape} as {self.format.channels} "
            f"channel{'s' * (self.format.channels > 1)} of {width} x {height}"
        )
        self.fingerprint = f"{self.fingerprint} fields {channels_last}"

    def load(self, index: int) -> tuple[Array, int]:
        """Return a field ``[c, h, w]``, and its label or -1.

        Returns:
            The field is contiguous, in the type of the file and the byte order of the machine; NaN is unknown.

        Raises:
            Exception: of many types, if the file is broken.
        """
        values = read_values(self.files[index], self.channels_last)
        values = values.astype(self._types.get(values.dtype.name, values.dtype))
        if (values.dtype.name, len(values)) != (self.format.dtype, self.format.channels):
            raise ValueError("it has changed since the folder was opened")
        return values, self._labels[index]

    def size_of(self, index: int) -> tuple[int, int]:
        """Return the width and height of a field [px]."""
        return read_header(self.files[index]).size(self.channels_last)

    def rows(self, framing: Framing) -> FieldRows:
        """Return how the fields become rows of a store."""
        return FieldRows(framing, self.format, self.store_bits)

    @property
    def space(self) -> Fields:
        """The space of stored fields; their range, which is not known yet, is one that suits every transform."""
        channels, dtype = self.format.channels, stored_type(self.format.dtype, self.store_bits)
        return stored_space(self.format, dtype, Framing(1, 1), (1.0,) * channels, (2.0,) * channels)

    @classmethod
    def claim(cls, files: Sequence[Path]) -> tuple[bool, list[Path]]:
        """Return whether most files of a folder are measurements, by the headers of some, and some measurements.

        Files ``NAME*.npz`` beside a picture ``NAME`` are the caches of other programs.
        """
        pictures = [*filter(is_image, files)]
        stems = {(file.parent, file.stem) for file in pictures}
        arrays = [file for file in files if file.suffix.lower() in (".npy", ".npz") and not _is_cache(file, stems)]
        found = dict[Path, bool]()
        for file in pictures[:: 1 + len(pictures) // SAMPLED]:
            with suppress(Exception):  # of many types, about a broken picture
                found[file] = is_measured(file)
        measured = [file for file, answer in found.items() if answer]
        return len(arrays) > len(pictures) or 2 * len(measured) > len(found), measured

    def _read_headers(self, path: Path) -> dict[Path, Header]:
        """Return the headers of all files that have a readable one."""
        headers, problems = dict[Path, Header](), list[str]()
        for file in self.files:
            try:
                headers[file] = read_header(file)
            except UsageError:  # a package is missing
                raise
            except Exception as error:  # decoders raise exceptions of many types
                reason = getattr(error, "strerror", None) or first_line(error)
                problems.append(f"{printable(file)}: {reason}")
        if not headers:
            raise UsageError(f"none of the {len(problems)} fields in {path} can be read; the first is {problems[0]}")
        return headers


def _check_agreement(formats: dict[Path, FieldFormat]) -> None:
    """Check that files agree in type, channels and suffix.

    Raises:
        UsageError: if they differ; the message names the first file that differs from the majority.
    """

    def kind_of(each: FieldFormat) -> tuple[Any, ...]:
        return each.suffix, each.dtype, each.channels

    def in_words(kind: tuple[Any, ...]) -> str:
        suffix, dtype, channels = kind
        return f"{channels} channel{'s' * (channels > 1)} of {dtype} in {suffix}"

    [(usual, count)] = Counter(map(kind_of, formats.values())).most_common(1)
    odd = [file for file, each in formats.items() if kind_of(each) != usual]
    if odd:
        found = f"{len(odd)} of {len(formats)} fields differ from the others: the first, {printable(odd[0])}, has"
        differ = f"{in_words(kind_of(formats[odd[0]]))}, and the {count} others have {in_words(usual)}"
        raise UsageError(f"{found} {differ}: move it out of the folder, or convert it")


def _is_cache(file: Path, stems: Collection[tuple[Path, str]]) -> bool:
    """Return whether an archive of arrays has the name of a picture beside it, and a suffix such as ``_sd``."""
    ends = [found.start() for found in re.finditer(r"[\W_]", file.stem)] + [len(file.stem)]
    return file.suffix.lower() == ".npz" and any((file.parent, file.stem[:end]) in stems for end in ends)
