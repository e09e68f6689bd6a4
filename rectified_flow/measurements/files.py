"""Fields: measured values ``[c, h, w]`` in files, read and written without loss, and resized in floating point.

Nothing is unpickled. Imports no torch.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from rectified_flow.system.files import open_regular

if TYPE_CHECKING:
    from tifffile import TiffTags

FIELD_SUFFIXES = frozenset({".npy", ".tif", ".tiff", ".png"})
TYPES = ("uint8", "uint16", "int16", "int32", "uint32", "float16", "float32", "float64")
"""Types of values that are read and written; bool is read as uint8."""
RGB, UNSPECIFIED = 2, 0  # values of the tags of a TIFF's colours, and of its samples beside the colours
REDUCED, MASK = 1, 4  # bits of the tag of a TIFF's page that is a smaller copy, or a mask
RESOLUTION, NODATA = 282, 42113  # tags of a TIFF's resolution, and of GDAL's value that stands for "unknown"

MOST_CHANNELS, SMALL = 16, 32
"""Number of planes above which an array may be a stack of fields, and sides of fields that are often kept so [px]."""

COLOURS = 4  # number of channels up to which an array without others may be one field
FLATTENED = {784: (28, 28), 3072: (32, 32), 12288: (64, 64)}
"""Height and width of flattened pictures, grey or in RGB, by the number of their values, as in arrays of datasets."""

Array = NDArray[Any]
PixelSize = tuple[float, float, int]
StoreBits = Literal[16, 32]  # most bits of a stored value


@dataclass(frozen=True)
class FieldFormat:
    """Format of the files of a folder. Generated fields are written in the same format.

    All attributes are plain values, because the format is saved as JSON.
    """

    suffix: str
    """``.tif``, ``.npy`` or ``.png``."""
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


def read_field(file: Path, channels_last: bool | None) -> tuple[Array, FieldFormat, str]:
    """Read a file with one of :data:`FIELD_SUFFIXES`; any exception means a file that holds no field.

    Returns the values ``[c, h, w]``, where NaN is unknown, their format, and their type in the file: if it has a mark
    for unknown values, its integers are read as floating point.

    ``channels_last`` is whether an array of three axes is ``[h, w, c]`` rather than ``[c, h, w]``; by default, the
    shorter axis is that of the channels. The headers of TIFF and PNG files determine the axis.
    """
    suffix = file.suffix.lower().replace(".tiff", ".tif")
    if suffix not in READERS:
        raise ValueError(f"fields are in files that end with {', '.join(READERS)}")
    with open_regular(file) as stream:
        values, is_last, unknown, pixel_size, pages = READERS[suffix](stream)
    values = values.astype(np.uint8) if values.dtype.kind == "b" else values
    file_type, is_flat = values.dtype.name, values.ndim == 2
    if file_type not in TYPES:
        raise ValueError(f"its values are of the type {file_type}; convert them to one of {', '.join(TYPES)}")
    if values.ndim not in (2, 3) or values.size == 0:
        several = f" in {len(values)} files, one for each item" * (values.ndim == 4)
        raise ValueError(
            f"its shape is {values.shape}; save arrays of two axes, or of three with the channels{several}"
        )
    if unknown is not None:
        exact = np.float32 if values.dtype.itemsize <= 2 else np.float64  # a type that holds each integer
        values = values if values.dtype.kind == "f" else values.astype(exact)
        with np.errstate(over="ignore"):
            values = np.where(values == values.dtype.type(unknown), np.nan, values)  # rounded as the values are
    if is_last is None:
        if channels_last is None:
            refuse_stack(values.shape)
        is_shorter = values.shape[-1] < values.shape[0] if channels_last is None else channels_last
        is_last = is_shorter and not is_flat
    values = values[None] if is_flat else np.moveaxis(values, 2, 0) if is_last else values
    how = FieldFormat(suffix, values.dtype.name, len(values), is_last, is_flat, pixel_size, pages)
    return values.astype(how.dtype, order="C"), how, file_type


def refuse_stack(shape: tuple[int, ...], *, is_alone: bool = False) -> None:
    """Refuse an array that is more likely a stack of fields, or of flattened ones, than one field.

    Args:
        shape: ``[n, h, w]``, or ``[n, h * w]``.
        is_alone: whether there is no other array, so that a stack is more likely.

    Raises:
        ValueError: with both readings, and what to do for each.
    """
    count, *sides = shape
    if len(sides) == 1:
        height, width = FLATTENED.get(sides[0], (0, 0))
        is_stack = height > 0 and count != sides[0]
    else:
        height, width = sides
        is_square = height == width != count and count > MOST_CHANNELS
        is_stack = (is_square and (count > width or width <= SMALL)) or (is_alone and min(count, width) > COLOURS)
    if is_stack:
        stack = f"save {count} pictures of {height} x {width} px in {count} files of two axes"
        field = "or pass channels_last=False in `space`"
        raise ValueError(f"its shape is {shape}: {stack}, {field} if it is one of {count} channels")


def _read_array(stream: IO[bytes]) -> Contents:
    return Contents(np.lib.format.read_array(stream, allow_pickle=False))


def _read_png(stream: IO[bytes]) -> Contents:
    values = import_module("imagecodecs").png_decode(stream.read())
    return Contents(values, channels_last=values.ndim == 3)


def _read_tiff(stream: IO[bytes]) -> Contents:
    """Read a TIFF file, whose pages of full size are channels.

    Its pages are read one by one, because descriptions of formats such as OME may refer to other files.
    """
    found = [*import_module("tifffile").TiffFile(stream, name="the file").pages]
    pages = [page for page in found if not page.subfiletype & (REDUCED | MASK)]
    page, alike = pages[0], len({(page.shape, page.dtype, page.axes) for page in pages}) == 1
    if not alike or page.axes not in (("YX",) if len(pages) > 1 else ("YX", "YXS", "SYX")):
        raise ValueError(f"it has {len(pages)} pages of shape {page.shape}; save channels as pages, or in one page")
    planes = [each.asarray(maxworkers=1) for each in pages]
    values = np.stack(planes) if len(planes) > 1 else planes[0]
    size = *page.resolution, int(page.resolutionunit)
    is_known = RESOLUTION in page.tags and size != (1, 1, 1)  # writers set 1 without a unit if it is unknown
    return Contents(values, page.axes == "YXS", _nodata(found[0].tags), size if is_known else None, len(pages) > 1)


READERS = {".npy": _read_array, ".png": _read_png, ".tif": _read_tiff}


def _nodata(tags: "TiffTags") -> float | None:
    """Return the value that stands for "unknown" in a GeoTIFF file; None without such a tag."""
    with suppress(TypeError, ValueError):  # absent, or no number
        return float(str(tags.valueof(NODATA)).strip("\0 "))
    return None


def is_measured(file: Path) -> bool:
    """Return whether a picture file holds measurements rather than a picture, by its header.

    These are values of 16 or more bits or of float, or a TIFF file with 2 or more than 4 channels, with a fourth one
    that is no transparency, or with several pages. Neither tifffile nor imagecodecs is needed. Returns False for a file
    that cannot be read.
    """
    with suppress(Exception), open_regular(file) as stream:  # decoders raise exceptions of many types
        head = stream.read(26)
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            return head[24] > 8  # bits of a value
        if not head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):  # whatever the file is called
            return False
        page = ImageFileDirectory_v2(head[: 16 if 43 in head[2:4] else 8])  # 43 for BigTIFF
        stream.seek(page.next)
        page.load(stream)
        has_values = max(page.get(258, (1,))) > 8 or page.get(277, 1) not in (1, 3, 4)  # bits, and number of channels
        # A fourth channel beside RGB that is no transparency, such as near infrared.
        has_values |= page.get(262) == RGB and page.get(277) == 4 and UNSPECIFIED in page.get(338, (UNSPECIFIED,))
        if has_values or not page.next:
            return has_values
        stream.seek(page.next)  # a second page of full size is a second channel
        page.load(stream)
        return not page.get(254, 0) & (REDUCED | MASK)
    return False


def encode_field(values: Array, how: FieldFormat) -> bytes:
    """Return the bytes of a file with a field.

    For a type of integers, values ``[c, h, w]`` are rounded, and NaN is the smallest value of the type; values outside
    the type's range get the nearest value inside.
    """
    array = as_type(values, np.dtype(how.dtype))
    array = array[0] if how.two_dimensional else np.moveaxis(array, 0, 2) if how.channels_last else array
    array, content = np.ascontiguousarray(array), BytesIO()
    match how.suffix:
        case ".npy":
            np.save(content, array, allow_pickle=False)
        case ".png":
            content.write(import_module("imagecodecs").png_encode(array))
        case _:
            colours = "rgb" if how.channels_last and how.channels == 3 else "minisblack"
            axis = None if how.pages or how.two_dimensional else "contig" if how.channels_last else "separate"
            *resolution, unit = how.pixel_size or (1, 1, 1)
            layout = {"photometric": colours, "planarconfig": axis, "resolution": resolution, "resolutionunit": unit}
            import_module("tifffile").imwrite(content, array, metadata=None, software=False, **layout)
    return content.getvalue()


def as_type(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values of another type, the nearest in its range."""
    exact = values.astype(np.float64)
    if dtype.kind == "f":
        return exact.clip(float(np.finfo(dtype).min), float(np.finfo(dtype).max)).astype(dtype)
    limits = np.iinfo(dtype)
    return np.nan_to_num(np.rint(exact), nan=limits.min).clip(limits.min, limits.max).astype(dtype)


def fit_field(values: Array, size: tuple[int, int], *, pad: bool = False) -> Array:
    """Resize a field ``[c, h, w]`` to a width and height, and crop it to the centre or pad it.

    Pixels are interpolated linearly, and averaged where the field shrinks, so that no value leaves the range of its
    channel. NaN is unknown: a pixel is the mean of the known part, and NaN where more than half is unknown. Padding is
    NaN, or the smallest value of the channel for integers. A field of this size is returned as it is.
    """
    if values.shape[:0:-1] == size:
        return values

    def resized(planes: Array) -> Array:
        fitted = list[Image.Image]()
        for image in map(Image.fromarray, planes.astype(np.float32)):
            linear = Image.Resampling.BILINEAR
            fitted.append(ImageOps.pad(image, size, linear, color=0) if pad else ImageOps.fit(image, size, linear))
        return np.stack([*map(np.asarray, fitted)])

    known = ~np.isnan(values)
    total, weight = resized(np.where(known, values, 0)), resized(known)
    result = np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0.5 - 1e-6)
    if values.dtype.kind != "f":
        result = np.where(np.isnan(result), values.min(axis=(1, 2), keepdims=True), np.rint(result))
    return result.astype(stored_type(values.dtype.name, 32))
