"""Fields: measured values ``[c, h, w]`` in files, read and written without loss.

A file is never trusted: its header is checked against its size before memory is allocated, and nothing is unpickled.
Imports no torch.
"""

import os
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import open_regular, printable

FIELD_SUFFIXES = frozenset({".npy", ".npz", ".tif", ".tiff", ".png"})
TYPES = ("uint8", "uint16", "int16", "int32", "uint32", "float16", "float32", "float64")
"""Types of values that are read and written; bool is read as uint8."""
MOST_VALUES, MOST_PAGES, MOST_CHANNELS = 2**31, 4096, 64
"""Largest number of values and of pages of a file, and of channels that are recognised by the shape of an array."""
MOST_HEADER = 2**14
"""Number of bytes that are read as the header of an array; numpy's own limit is 10,000."""
MOST_RATIO, UNSUSPICIOUS = 1400, 2**26
"""Largest ratio of sizes that deflate and LZW reach, and the size below which any ratio is accepted [bytes]."""
LOSSLESS = {1: "none", 5: "LZW", 8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "Zstandard"}
"""Compressions of a TIFF file that are read, by their number in the file."""
REDUCED, MASK, PALETTE = 1, 4, 3
"""Bits of the tag of a TIFF's page that is a smaller copy or a mask, and the number of a palette in TIFF and PNG."""
PNG_COLOURS = "PNG files of 16-bit colours"
NODATA = 42113
"""Number of GDAL's tag of the value that stands for "unknown"."""
PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
"""Number of channels by the number of the colour type in the header of a PNG file."""

Array = np.ndarray[Any, np.dtype[Any]]
PixelSize = tuple[float, float, int]
StoreBits = Literal[16, 32]
"""Most bits of a stored value."""


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


@dataclass(frozen=True)
class Header:
    """The declared format of the array in a file."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    """``[h, w]``, ``[c, h, w]`` or ``[h, w, c]``."""
    channels_last: bool | None = None
    """None if the file does not say which axis is that of the channels."""
    pixel_size: PixelSize | None = None
    pages: bool = False
    integers: str | None = None
    """The type in the file, if it has a mark for unknown values and they are read as float."""

    @property
    def leaves_open(self) -> bool:
        """Whether the array has three axes and the file does not declare the axis of the channels."""
        return len(self.shape) == 3 and self.channels_last is None

    def is_last(self, channels_last: bool | None) -> bool:
        """Return whether the last axis is that of the channels.

        Args:
            channels_last: the value for files that do not declare it; None decides by the shape: the axis of channels
                is at most half as long as the two others, and at most :data:`MOST_CHANNELS` long.

        Raises:
            UsageError: if the shape is ambiguous.
        """
        if len(self.shape) == 2:
            return False
        answer = channels_last if self.channels_last is None else self.channels_last
        if answer is not None:
            return answer
        for axis, others in ((0, self.shape[1:]), (2, self.shape[:2])):
            if 2 * self.shape[axis] <= min(others) and self.shape[axis] <= MOST_CHANNELS:
                return axis == 2
        raise UsageError(
            f"the axis of the channels is ambiguous in the shape {self.shape}; pass --space_options "
            "channels_last=True if it is the last one, or channels_last=False if it is the first"
        )

    def format(self, channels_last: bool | None) -> FieldFormat:
        """Return the format of the file; see :meth:`is_last`."""
        last, flat = self.is_last(channels_last), len(self.shape) == 2
        channels = 1 if flat else self.shape[2 if last else 0]
        return FieldFormat(self.suffix, self.dtype, channels, last, flat, self.pixel_size, self.pages)

    def size(self, channels_last: bool | None) -> tuple[int, int]:
        """Return width and height [px]; see :meth:`is_last`."""
        height, width = self.shape[:2] if self.is_last(channels_last) else self.shape[-2:]
        return width, height


Opened = tuple[Header, Callable[[], Array]]
"""The header of a file, and a function that reads the values in the shape of the header, while the file is open."""


def stored_type(dtype: str, store_bits: StoreBits) -> str:
    """Return the stored type: integers of up to 16 bits keep theirs, others become float16 or float32."""
    given = np.dtype(dtype)
    if given.kind in "iu" and given.itemsize <= 2:
        return dtype
    return "float16" if store_bits == 16 or dtype == "float16" else "float32"


def read_header(file: Path) -> Header:
    """Return the header of a file.

    Raises:
        Exception: of many types, if it cannot be read or holds no field. The message is a clause without the file.
        UsageError: if a package is missing.
    """
    with open_regular(file) as stream:
        return _open(file, stream)[0]


def read_values(file: Path, channels_last: bool | None) -> Array:
    """Return the values of a file ``[c, h, w]``, with the errors of :func:`read_header` and :meth:`Header.is_last`."""
    with open_regular(file) as stream:
        header, read = _open(file, stream)
        last = header.is_last(channels_last)
        values = read()
    values = values[None] if values.ndim == 2 else np.moveaxis(values, 2, 0) if last else values
    if values.dtype.kind == "f" and np.isinf(values).any():
        raise ValueError("it holds an infinite value; write NaN for an unknown one")
    return values.astype(header.dtype, order="C")


def read_field(file: Path, channels_last: bool | None) -> Array:
    """Return the field of a file.

    Args:
        file: a file with one of :data:`FIELD_SUFFIXES`.
        channels_last: whether an array of three axes is ``[h, w, c]`` rather than ``[c, h, w]``; None to decide it by
            its shape. TIFF and PNG files say it themselves.

    Returns:
        ``[c, h, w]``, contiguous, in the type of the file and the byte order of the machine. NaN is an unknown value.

    Raises:
        UsageError: if the file cannot be read or holds no field, or a package is missing.
    """
    try:
        return read_values(file, channels_last)
    except Exception as error:  # decoders raise exceptions of many types
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{printable(file)} cannot be read as a field: {reason}") from error


def require(package: str, what: str) -> Any:
    """Import a package.

    Args:
        package: tifffile or imagecodecs.
        what: the files that need it, for the error message.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UsageError(f"reading and writing {what} needs {package}: pip install tifffile imagecodecs") from error


def _open(file: Path, stream: IO[bytes]) -> Opened:
    """Read the header of an open file."""
    size = os.fstat(stream.fileno()).st_size
    match file.suffix.lower():
        case ".npy":
            return _open_array(stream, size, ".npy")
        case ".npz":
            return _open_archive(stream, size)
        case ".png":
            return _open_png(stream, size)
    return _open_tiff(stream, size)


def _check(shape: tuple[int, ...], dtype: np.dtype[Any], room: int) -> str:
    """Return the name of the type of values after a check of a declared array.

    Args:
        shape: the shape.
        dtype: the type.
        room: largest size that the values can have in a file of this size [bytes].

    Raises:
        ValueError: if it is no field, or the file is too small for it.
    """
    name = "uint8" if dtype.kind == "b" else dtype.name
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled; save an array of numbers")
    if dtype.names is not None:
        raise ValueError("it holds records; save each of their numbers as a channel")
    if dtype.kind == "c":
        raise ValueError("it holds complex numbers; save the real and the imaginary part as two channels")
    if name not in TYPES:
        raise ValueError(f"its values are of the type {name}; convert them to one of {', '.join(TYPES)}")
    if len(shape) not in (2, 3):
        raise ValueError(f"its shape is {shape}; save arrays of two axes, or of three with the channels")
    if min(shape) < 1:
        raise ValueError(f"it is empty: its shape is {shape}")
    if prod(shape) > MOST_VALUES:
        raise ValueError(f"it declares {prod(shape)} values, more than {MOST_VALUES}; cut it into several files")
    if prod(shape) * dtype.itemsize > room:
        raise ValueError(f"it declares the shape {shape}, which the file is too small to hold")
    return name


def _room(size: int) -> int:
    """Return the largest size of the values in a compressed file of some size [bytes]."""
    return max(UNSUSPICIOUS, MOST_RATIO * size)


def _open_array(stream: IO[bytes], room: int, suffix: str) -> Opened:
    """Read a header of numpy's format, for which see ``numpy.lib.format``."""
    head = BytesIO(stream.read(MOST_HEADER))  # never more, whatever length the header declares
    version = np.lib.format.read_magic(head)
    read_rest = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_rest(head)
    header = Header(suffix, _check(shape, dtype, room), shape)

    def read() -> Array:
        stream.seek(head.tell())
        content = stream.read(prod(shape) * dtype.itemsize)
        return np.frombuffer(content, dtype, prod(shape)).reshape(shape, order="F" if is_fortran else "C")

    return header, read


def _open_archive(stream: IO[bytes], size: int) -> Opened:
    archive = zipfile.ZipFile(stream)
    members = archive.infolist()
    if len(members) != 1:
        some = ", ".join(member.filename.removesuffix(".npy") for member in members[:4])
        raise ValueError(f"it holds {len(members)} arrays ({some}); save one array in each file")
    if members[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("its compression is not that of numpy; write it by numpy.savez_compressed")
    member = archive.open(members[0])
    header, read = _open_array(member, _room(size), ".npz")

    def read_whole() -> Array:
        values = read()
        if member.read(1):  # at the end, it compares the checksum
            raise ValueError("it holds more values than its header declares")
        return values

    return header, read_whole


def _png_header(stream: IO[bytes]) -> tuple[int, int, int, int]:
    """Return width and height [px], bits per value, and the number of the colour type."""
    head = stream.read(26)
    if len(head) < 26 or head[:8] != b"\x89PNG\r\n\x1a\n" or head[12:16] != b"IHDR":
        raise ValueError("it is not a PNG file")
    width, height, bits, colours = struct.unpack(">IIBB", head[16:])
    return width, height, bits, colours


def _open_png(stream: IO[bytes], size: int) -> Opened:
    width, height, bits, colours = _png_header(stream)
    if colours == PALETTE:
        raise ValueError("it has a palette, which is not a measurement; save it as grey or as RGB")
    if colours not in PNG_CHANNELS or bits not in (8, 16):
        raise ValueError(f"it has {bits} bits per value; save 8 or 16")
    channels, dtype = PNG_CHANNELS[colours], np.dtype(f"uint{bits}")
    shape = (height, width) if channels == 1 else (height, width, channels)
    header = Header(".png", _check(shape, dtype, _room(size)), shape, channels_last=channels > 1)
    # Pillow keeps 8 bits of such colours, and torchvision's decoder crashes on a damaged file.
    decoder = require("imagecodecs", PNG_COLOURS) if bits == 16 and channels > 1 else None

    def read() -> Array:
        stream.seek(0)
        content = stream.read()  # a chunk may declare more than the file has
        if decoder is None:
            return np.asarray(Image.open(BytesIO(content), formats=["PNG"])).astype(dtype)
        values: Array = decoder.png_decode(content)
        return values

    return header, read


def _open_tiff(stream: IO[bytes], size: int) -> Opened:
    """Read the header of a TIFF file, whose pages of full size are channels.

    Its pages are read one by one, because descriptions of formats such as OME may refer to other files.
    """
    found = list(islice(require("tifffile", "TIFF files").TiffFile(stream, name="the file").pages, MOST_PAGES + 1))
    if len(found) > MOST_PAGES:
        raise ValueError(f"it has more than {MOST_PAGES} pages")
    pages = [page for page in found if not page.subfiletype & (REDUCED | MASK)]
    if len({(page.shape, page.dtype, page.axes) for page in pages}) != 1:
        raise ValueError("its pages differ in size or type; save pages of one size, each with one channel")
    page, described = pages[0], found[0].description
    stack = re.match(r"ImageJ=.*^images=([0-9]+)", described, re.MULTILINE | re.DOTALL)
    if (stack and int(stack[1]) > len(found)) or '"truncated": true' in described:  # by tifffile
        raise ValueError("it holds more images than it has pages; save each of them as a page")
    if page.axes not in (("YX",) if len(pages) > 1 else ("YX", "YXS", "SYX")):
        raise ValueError(f"it has {len(pages)} pages of shape {page.shape}; save channels as pages, or in one page")
    if page.photometric == PALETTE:
        raise ValueError("it has a palette, which is not a measurement; save it as grey or as RGB")
    if page.dtype is None:
        raise ValueError(
            f"its type of {page.bitspersample} bits is not supported; convert it to one of {', '.join(TYPES)}"
        )
    room = size * 8 * page.dtype.itemsize // page.bitspersample  # without compression, 12 bits take less than 16
    for each in pages:
        if each.is_tiled:  # a tile is decoded whole, also where it reaches beyond the page
            _check(each.chunks, each.dtype, _room(size))
        if any(begin + count > size for begin, count in zip(each.dataoffsets, each.databytecounts, strict=False)):
            raise ValueError("it is cut off: its header declares more bytes than it has")
        if each.compression not in LOSSLESS:
            raise ValueError(
                f"its compression is not supported; save it with {', '.join(dict.fromkeys(LOSSLESS.values()))}"
            )
        if each.compression != 1:
            room = _room(size)
    shape = (len(pages), *page.shape) if len(pages) > 1 else page.shape
    dtype, unknown = _check(shape, page.dtype, room), _nodata(found[0].tags)
    integers = dtype if unknown is not None and page.dtype.kind != "f" else None
    if integers:
        dtype = "float32" if page.dtype.itemsize <= 2 else "float64"  # holds NaN and each of the integers

    def read() -> Array:
        planes = [each.asarray(maxworkers=1) for each in pages]
        values: Array = np.stack(planes) if len(planes) > 1 else planes[0]
        if unknown is None:
            return values
        with np.errstate(over="ignore"):
            mark = page.dtype.type(unknown) if page.dtype.kind == "f" else unknown  # rounded as the values are
        return np.where(values == mark, np.nan, values).astype(dtype)

    last = page.axes == "YXS"
    return Header(".tif", dtype, shape, last, _pixel_size(page.tags), len(pages) > 1, integers), read


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
    pages. Neither tifffile nor imagecodecs is needed.

    Raises:
        Exception: of many types, if it cannot be read.
    """
    with open_regular(file) as stream:
        match file.suffix.lower():
            case ".png":
                return _png_header(stream)[2] > 8
            case ".tif" | ".tiff":
                return _is_measured_tiff(stream)
    return False


def _is_measured_tiff(stream: IO[bytes]) -> bool:
    head = stream.read(8)
    if 43 in head[2:4]:  # BigTIFF
        head += stream.read(8)
    page, pages = ImageFileDirectory_v2(head), 0
    for _ in range(MOST_PAGES):
        stream.seek(page.next)
        page.load(stream)
        channels, bits = page.get(277, 1), max(page.get(258, (1,)))
        pages += not page.get(254, 0) & (REDUCED | MASK)
        if bits > 8 or channels == 2 or channels > 4 or pages > 1:
            return True
        if not page.next:
            return False
    return True


def encode_field(values: Array, how: FieldFormat) -> bytes:
    """Return the bytes of a file with a field.

    Args:
        values: ``[c, h, w]``, float or integers. For a type of integers they are rounded, and NaN is the smallest
            value of the type; values outside the type's range get the nearest value inside.
        how: the format of the file.

    Raises:
        UsageError: if a package is missing.
    """
    array = _as_type(values, np.dtype(how.dtype))
    array = array[0] if how.two_dimensional else np.moveaxis(array, 0, 2) if how.channels_last else array
    array, content = np.ascontiguousarray(array), BytesIO()
    match how.suffix:
        case ".npy":
            np.save(content, array, allow_pickle=False)
        case ".npz":
            np.savez_compressed(content, array, allow_pickle=False)
        case ".png":
            if array.itemsize == 1 or how.channels == 1:
                Image.fromarray(array).save(content, "PNG")
            else:
                content.write(require("imagecodecs", PNG_COLOURS).png_encode(array))
        case _:
            across, down, unit = how.pixel_size or (1, 1, 1)
            axis_of_channels = "contig" if how.channels_last else "separate"
            require("tifffile", "TIFF files").imwrite(
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


def _as_type(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values of another type, the nearest in its range."""
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return np.clip(values.astype(np.float64), float(limits.min), float(limits.max)).astype(dtype)
    bounds = np.iinfo(dtype)
    rounded = np.nan_to_num(np.rint(values.astype(np.float64)), nan=bounds.min)
    return rounded.clip(bounds.min, bounds.max).astype(dtype)
