"""A folder of fields: measured values in files, with or without a subfolder per class."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rectified_flow.data.fields import (
    FIELD_SUFFIXES,
    Array,
    FieldFormat,
    Header,
    encode_field,
    is_measured,
    read_field,
    read_header,
    read_values,
)
from rectified_flow.data.resizing import fit_field
from rectified_flow.data.sources.image_folder import IMAGE_SUFFIXES, OTHER_SUFFIXES, FileFolder, find_files, is_image
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import printable

__all__ = ["FIELD_SUFFIXES", "FieldFolder", "FieldFormat", "encode_field", "fit_field", "holds_fields", "read_field"]


class FieldFolder(FileFolder):
    """All fields below ``path``, of one type and number of channels; see :class:`FileFolder` for their classes.

    The headers of all files are read at once. A file whose header cannot be read counts as broken when it is loaded.

    Args:
        path: the folder.
        channels_last: whether arrays of three axes are ``[h, w, c]`` rather than ``[c, h, w]``; None to decide it by
            the shape of the first.
        skip_unreadable: skip subfolders that cannot be read, instead of raising.

    Attributes:
        format: how the files hold their fields.
        size: width and height of the first field [px].
        notes: lines on the shape of the arrays, on files that are not read, and on files without a class.

    Raises:
        UsageError: if the folder cannot be read or contains no fields, the files differ in type, channels or suffix,
            the axis of the channels is ambiguous, or a package is missing.
    """

    suffixes, other_suffixes = FIELD_SUFFIXES, (IMAGE_SUFFIXES | OTHER_SUFFIXES) - FIELD_SUFFIXES
    kind = noun = "fields"

    def __init__(self, path: Path, *, channels_last: bool | None = None, skip_unreadable: bool = False) -> None:
        super().__init__(path, skip_unreadable=skip_unreadable)
        headers = self._read_headers(path)
        undecided = next((file for file, header in headers.items() if header.leaves_open), None)
        if undecided is not None:
            try:
                channels_last = headers[undecided].is_last(channels_last)
            except UsageError as error:
                raise UsageError(f"{printable(undecided)} is unclear: {error}") from error
        formats = {file: header.format(channels_last) for file, header in headers.items()}
        _check_agreement(formats)
        first, sizes = next(iter(headers)), {each.pixel_size for each in formats.values()}
        self.channels_last = channels_last
        self.format = replace(formats[first], pixel_size=sizes.pop() if len(sizes) == 1 else None)
        self.size = headers[first].size(channels_last)
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
        if (values.dtype.name, len(values)) != (self.format.dtype, self.format.channels):
            raise ValueError("it has changed since the folder was opened")
        return values, self._labels[index]

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


def holds_fields(folder: Path) -> bool:
    """Return whether a folder holds measurements, and not pictures, by the headers of its files.

    A folder holds them if it has more numpy files than pictures, or if its first picture with an intact header holds
    measurements (:func:`rectified_flow.data.fields.is_measured`).
    """
    unreadable = list[OSError]()  # reported when the files are read
    files = find_files(folder, unreadable.append)
    arrays, pictures = [file for file in files if file.suffix.lower() in (".npy", ".npz")], [*filter(is_image, files)]
    if len(arrays) > len(pictures):
        return True
    for file in pictures:
        with suppress(Exception):  # of many types, about a broken picture: the next decides
            return is_measured(file)
    return False
