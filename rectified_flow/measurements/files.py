"""Fields: measured values ``[c, h, w]`` in files, read and written without loss, and resized in floating point.

Nothing is unpickled, and a declared shape fills no memory that the values in the file do not fill. Imports no torch.
"""

import os
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from itertools import islice
from math import ceil, floor, prod
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from rectified_flow.errors import UsageError
from rectified_flow.system.files import open_regular

FIELD_SUFFIXES = frozenset({".npy", ".npz", ".tif", ".tiff", ".png"})
TYPES = ("uint8", "uint16", "int16", "int32", "uint32", "float16", "float32", "float64")
"""Types of values that are read and written; bool is read as uint8."""
MAX_CHANNELS, MAX_PAGES = 64, 4096
"""Largest number of channels that are recognised by the shape of an array, and of pages of a file."""
MAX_RATIO, UNSUSPICIOUS = 1400, 2**26  # deflate and LZW compress no better
"""Largest ratio of the sizes of values and their file, and the size below which any ratio is accepted [bytes]."""
REDUCED, MASK, PALETTE = 1, 4, 3
"""Bits of the tag of a TIFF's page that is a smaller copy or a mask, and the number of a palette."""
NODATA = 42113  # number of GDAL's tag of the value that stands for "unknown"

Array = np.ndarray[Any, np.dtype[Any]]
PixelSize = tuple[float, float, int]
StoreBits = Literal[16, 32]  # most bits of a stored value


@dataclass(frozen=True)
class FieldFormat:
    """Format of the files of a folder. Generated fields are written in the same format.

    All attributes are plain values, because the format is saved as JSON.
    """

    suffix: str
    """``.tif``, ``.npy``, ``.npz`` or ``.png``."""
    dtype: str
    """numpy's name of the type of the values, one of :data:`TYPES`."""
    channels: int
    channels_last: bool
    """Whether the file holds ``[h, w, c]``; otherwise ``[h, w]`` or ``[c, h, w]``, planes or pages of a TIFF file."""
    two_dimensional: bool = False
    """Whether the file holds ``[h, w]``, without an axis of channels."""
    pixel_size: PixelSize | None = None
    """Horizontal and vertical resolution and the number of their unit in a TIFF file, the only tags that are copied."""
    pages: bool = False
    """Whether each channel is a page of a TIFF file; otherwise the channels of ``[c, h, w]`` are planes of one page."""

    def __str__(self) -> str:
        return f"{self.channels} channel{'s' * (self.channels > 1)} of {self.dtype}"


class Field(NamedTuple):
    """The field of a file."""

    values: Array
    """``[c, h, w]``, contiguous, in the byte order of the machine. NaN is an unknown value."""
    format: FieldFormat
    file_type: str
    """The type in the file. If it has a mark for unknown values, its integers are read as floating point."""


class Contents(NamedTuple):
    """The array of a file, as the file holds it."""

    values: Array
    """``[h, w]``, ``[c, h, w]`` or ``[h, w, c]``."""
    channels_last: bool | None = None
    """None if the file does not say which axis is that of the channels."""
    unknown: float | None = None
    """The value that stands for "unknown"."""
    pixel_size: PixelSize | None = None
    pages: bool = False


def stored_type(dtype: str, store_bits: StoreBits) -> str:
    """Return the stored type: integers of up to 16 bits keep theirs, others become float16 or float32."""
    given = np.dtype(dtype)
    if given.kind in "iu" and given.itemsize <= 2:
        return dtype
    return "float16" if store_bits == 16 or dtype == "float16" else "float32"


def read_field(file: Path, channels_last: bool | None) -> Field:
    """Read a file with one of :data:`FIELD_SUFFIXES`.

    Args:
        file: the file.
        channels_last: whether an array of three axes is ``[h, w, c]`` rather than ``[c, h, w]``; None to decide it by
            its shape. TIFF and PNG files say it themselves.

    Raises:
        Exception: of many types, if the file cannot be read or holds no field. The message is a clause without the
            file.
        UsageError: if the shape is ambiguous, or a package is missing.
    """
    suffix = file.suffix.lower().replace(".tiff", ".tif")
    with open_regular(file) as stream:
        found = READERS[suffix](stream, os.fstat(stream.fileno()).st_size)
    values, is_last, is_flat = _checked(found.values), found.channels_last, found.values.ndim == 2
    file_type = values.dtype.name
    if found.unknown is not None:
        values = _with_nan(values, found.unknown)
    if values.dtype.kind == "f" and np.isinf(values).any():
        raise ValueError("it holds an infinite value; write NaN for an unknown one")
    if is_last is None:
        is_last = not is_flat and has_channels_last(values.shape, channels_last)
    values = values[None] if is_flat else np.moveaxis(values, 2, 0) if is_last else values
    how = FieldFormat(suffix, values.dtype.name, len(values), is_last, is_flat, found.pixel_size, found.pages)
    return Field(values.astype(how.dtype, order="C"), how, file_type)


def _checked(values: Array) -> Array:
    """Return an array of a file if it is a field, and truth values as numbers."""
    values = values.astype(np.uint8) if values.dtype.kind == "b" else values
    if values.dtype.name not in TYPES:
        raise ValueError(f"its values are of the type {values.dtype.name}; convert them to one of {', '.join(TYPES)}")
    if values.ndim not in (2, 3) or values.size == 0:
        raise ValueError(f"its shape is {values.shape}; save arrays of two axes, or of three with the channels")
    return values


def has_channels_last(shape: tuple[int, ...], channels_last: bool | None) -> bool:
    """Return whether the last of three axes is that of the channels.

    By default the shape decides: the axis of channels is at most half as long as the two others, and at most
    :data:`MAX_CHANNELS` long.

    Raises:
        UsageError: if the shape is ambiguous.
    """
    if channels_last is not None:
        return channels_last
    first, height, last = shape
    if 2 * min(first, last) > min(max(first, last), height) or min(first, last) > MAX_CHANNELS:
        raise UsageError(f"the axis of channels is ambiguous in the shape {shape}; pass channels_last=True or False")
    return last < first


def require(package: str) -> Any:
    """Import tifffile or imagecodecs.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UsageError(f"TIFF and PNG files of fields need {package}: pip install tifffile imagecodecs") from error


def _read_array(stream: IO[bytes], _size: int) -> Contents:
    values = np.lib.format.read_array(stream, allow_pickle=False)
    if stream.read(1):  # at the end of an archive, this compares the checksum
        raise ValueError("it holds more values than its header declares")
    return Contents(values)


def _read_archive(stream: IO[bytes], size: int) -> Contents:
    archive = zipfile.ZipFile(stream)
    names = archive.namelist()
    if len(names) != 1:
        raise ValueError(f"it holds {len(names)} arrays; save one array in each file")
    return _read_array(archive.open(names[0]), size)


def _read_png(stream: IO[bytes], _size: int) -> Contents:
    values = require("imagecodecs").png_decode(stream.read())
    return Contents(values, channels_last=values.ndim == 3)


def _read_tiff(stream: IO[bytes], size: int) -> Contents:
    """Read a TIFF file, whose pages of full size are channels.

    Its pages are read one by one, because descriptions of formats such as OME may refer to other files.
    """
    found = list(islice(require("tifffile").TiffFile(stream, name="the file").pages, MAX_PAGES + 1))
    if len(found) > MAX_PAGES:  # which may lead in circles
        raise ValueError(f"it has more than {MAX_PAGES} pages")
    pages = [page for page in found if not page.subfiletype & (REDUCED | MASK)]
    if len({(page.shape, page.dtype, page.axes, page.chunks) for page in pages}) != 1:
        raise ValueError("its pages differ in size or type; save pages of one size, each with one channel")
    page = pages[0]
    if page.axes not in (("YX",) if len(pages) > 1 else ("YX", "YXS", "SYX")):
        raise ValueError(f"it has {len(pages)} pages of shape {page.shape}; save channels as pages, or in one page")
    if page.photometric == PALETTE or page.dtype is None:
        raise ValueError(f"it has a palette, or {page.bitspersample} bits per value; save one of {', '.join(TYPES)}")
    declared = max(len(pages) * prod(page.shape), prod(page.chunks))  # a tile is decoded whole, also beyond the page
    if declared * page.dtype.itemsize > max(UNSUSPICIOUS, MAX_RATIO * size):
        raise ValueError(f"it declares {declared} values, which it is too small to hold")
    planes = [each.asarray(maxworkers=1) for each in pages]
    values = np.stack(planes) if len(planes) > 1 else planes[0]
    return Contents(values, page.axes == "YXS", _nodata(found[0].tags), _pixel_size(page.tags), len(pages) > 1)


READERS = {".npy": _read_array, ".npz": _read_archive, ".png": _read_png, ".tif": _read_tiff}


def _with_nan(values: Array, unknown: float) -> Array:
    """Return values with NaN in place of the one that stands for "unknown"; a type of float holds each integer."""
    if values.dtype.kind != "f":
        exact = values.astype(np.float32 if values.dtype.itemsize <= 2 else np.float64)
        return np.where(values == unknown, np.nan, exact)
    with np.errstate(over="ignore"):
        return np.where(values == values.dtype.type(unknown), np.nan, values)  # rounded as the values are


def _nodata(tags: Any) -> float | None:
    """Return the value that stands for "unknown" in a GeoTIFF file; None without such a tag."""
    with suppress(TypeError, ValueError):  # absent, or no number
        return float(str(tags.valueof(NODATA)).strip("\0 "))
    return None


def _pixel_size(tags: Any) -> PixelSize | None:
    """Return the resolutions of a TIFF file and their unit; None if they are absent, or 1 without a unit."""
    try:
        across, down = (numerator / divisor for numerator, divisor in (tags.valueof(tag) for tag in (282, 283)))
        size = across, down, int(tags.valueof(296, 2))
    except (TypeError, ValueError, ZeroDivisionError):  # absent or damaged: not a value of the field
        return None
    return None if size == (1, 1, 1) or 0 in size else size


def is_measured(file: Path) -> bool:
    """Return whether a picture file holds measurements rather than a picture, by its header.

    These are values of 16 or more bits or of float, or a TIFF file with 2 or more than 4 channels or with several
    pages. Neither tifffile nor imagecodecs is needed. Returns False for a file that cannot be read.
    """
    suffix = file.suffix.lower()
    with suppress(Exception), open_regular(file) as stream:  # decoders raise exceptions of many types
        head = stream.read(26)
        if suffix == ".png":
            return head[24] > 8  # bits of a value
        return suffix in (".tif", ".tiff") and _is_measured_tiff(head, stream)
    return False


def _is_measured_tiff(head: bytes, stream: IO[bytes]) -> bool:
    page = ImageFileDirectory_v2(head[: 16 if 43 in head[2:4] else 8])  # 43 for BigTIFF
    for number in range(2):  # a second page of full size is a second channel
        if not page.next:
            return False
        stream.seek(page.next)
        page.load(stream)
        is_channel = number > 0 and not page.get(254, 0) & (REDUCED | MASK)
        if max(page.get(258, (1,))) > 8 or page.get(277, 1) not in (1, 3, 4) or is_channel:
            return True
    return False


def encode_field(values: Array, how: FieldFormat) -> bytes:
    """Return the bytes of a file with a field.

    Args:
        values: ``[c, h, w]``, float or integers. For a type of integers they are rounded, and NaN is the smallest
            value of the type; values outside the type's range get the nearest value inside.
        how: the format of the file.

    Raises:
        UsageError: if a package is missing.
    """
    array = as_type(values, np.dtype(how.dtype))
    array = array[0] if how.two_dimensional else np.moveaxis(array, 0, 2) if how.channels_last else array
    array, content = np.ascontiguousarray(array), BytesIO()
    match how.suffix:
        case ".npy":
            np.save(content, array, allow_pickle=False)
        case ".npz":
            np.savez_compressed(content, array, allow_pickle=False)
        case ".png":
            content.write(require("imagecodecs").png_encode(array))
        case _:
            across, down, unit = how.pixel_size or (1, 1, 1)
            axis_of_channels = "contig" if how.channels_last else "separate"
            require("tifffile").imwrite(
                content,
                array,
                photometric="rgb" if how.channels_last and how.channels == 3 else "minisblack",
                planarconfig=None if how.pages or how.two_dimensional else axis_of_channels,
                resolution=(across, down),
                resolutionunit=unit,
                metadata=None,
                software=False,
            )
    return content.getvalue()


def as_type(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values of another type, the nearest in its range."""
    exact = values.astype(np.float64)
    if dtype.kind == "f":
        return exact.clip(float(np.finfo(dtype).min), float(np.finfo(dtype).max)).astype(dtype)
    limits = np.iinfo(dtype)
    return np.nan_to_num(np.rint(exact), nan=limits.min).clip(limits.min, limits.max).astype(dtype)


def fit_field(values: Array, size: tuple[int, int], *, pad: bool = False) -> Array:
    """Resize a field, and crop it to the centre or pad it.

    A new pixel is the mean over a box that is as wide as the new pixel, and at least as wide as an old one. Shrinking
    therefore keeps the mean of the field, enlarging is linear, and no value leaves the range of its channel.

    Args:
        values: ``[c, h, w]``. NaN is unknown: the mean is that of the known part of the box, and NaN where more than
            half of the box is unknown.
        size: width and height of the result [px].
        pad: keep the whole field, and fill the rest with NaN, or with the smallest value of the channel for integers.

    Returns:
        ``[c, h, w]`` in the type of ``values``, computed in float64; integers are rounded. A field that has this size
        already is returned as it is.
    """
    channels, height, width = values.shape
    if (width, height) == size:
        return values
    scale = (min if pad else max)(size[0] / width, size[1] / height)
    inner = [max(1, round(side * scale)) for side in (height, width)] if pad else list(size[::-1])
    rows, columns = (
        _boxes(side, side if pad else min(side, after / scale), after)
        for side, after in zip((height, width), inner, strict=True)
    )
    top, left = (size[1] - inner[0]) // 2, (size[0] - inner[1]) // 2
    result = np.empty((channels, size[1], size[0]), values.dtype)
    for channel, place in zip(values, result, strict=True):
        known = ~np.isnan(channel)
        fitted = rows @ np.where(known, channel, 0) @ columns.T
        place[:] = np.nan if values.dtype.kind == "f" else channel.min()
        if not known.all():
            weight = rows @ known @ columns.T
            fitted = np.where(weight >= 0.5 - 1e-9, fitted / np.maximum(weight, 0.25), np.nan)
        if known.any():
            fitted = np.clip(fitted, np.nanmin(channel), np.nanmax(channel))
        fitted = fitted if values.dtype.kind == "f" else np.rint(fitted)
        place[top : top + inner[0], left : left + inner[1]] = fitted
    return result


def _boxes(side: int, extent: float, after: int) -> Any:
    """Return the weights that average ``side`` pixels, cropped to the middle ``extent``, to ``after`` pixels.

    The weights are a sparse matrix ``[after, side]``; each row has the sum 1.
    """
    from scipy.sparse import csr_array  # slow to import

    scale, start = extent / after, (side - extent) / 2
    if scale == 1:
        start = floor(start)  # whole pixels are cropped without a change of values
    width = max(scale, 1)
    begin = start + (np.arange(after) + 0.5) * scale - width / 2
    numbers = np.floor(begin).astype(np.intp)[:, None] + np.arange(ceil(width) + 1)
    overlap = np.minimum(numbers + 1, begin[:, None] + width) - np.maximum(numbers, begin[:, None])
    weights = np.maximum(overlap, 0)
    weights /= weights.sum(axis=1, keepdims=True)
    ends = np.arange(0, numbers.size + 1, numbers.shape[1])
    return csr_array((weights.ravel(), numbers.clip(0, side - 1).ravel(), ends), shape=(after, side))
