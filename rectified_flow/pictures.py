"""Pictures as files: opened, side by side in a grid, and written whole or not at all."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, PngImagePlugin
from torch import Tensor

from rectified_flow.errors import RunError
from rectified_flow.files import open_regular, replace_file

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
"""Formats that are opened, whatever a file is called: an EPS file, for one, would start another program."""
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
"""A PNG may hold a long text, such as the settings of the program that made it; all texts have a limit together."""


def open_picture(source: Path | IO[bytes]) -> Image.Image:
    """Open a picture without decoding it yet.

    Raises:
        OSError: if it is none, is no regular file, or is of another format than :data:`FORMATS`.
    """
    if isinstance(source, Path):
        open_regular(source).close()
    return Image.open(source, formats=FORMATS)


def over_white(image: Image.Image) -> Image.Image:
    """A picture of any mode in RGB, its transparent parts over white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def to_grid(images: Tensor, columns: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 ``[n, c, h, w]`` side by side in one picture ``[H, W, c]``, as near to a square as can be."""
    from torchvision.utils import make_grid  # takes seconds to load

    columns = columns or max(1, round(len(images) ** 0.5))
    grid: Tensor = make_grid(images, nrow=columns, padding=2, pad_value=255)
    return grid.permute(1, 2, 0).cpu().numpy()


def encode_picture(pixels: np.ndarray[Any, Any], suffix: str = ".png", **options: Any) -> bytes:
    """The bytes of a file with ``pixels`` ``[h, w, c]``, RGB or RGBA, in the format of its suffix."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, format=suffix[1:], **options)
    return content.getvalue()


def write_motion(path: Path, frames: Sequence[np.ndarray[Any, Any]], pauses: Sequence[int]) -> Path:
    """Write frames ``[h, w, 3]`` as a GIF that repeats, each shown for some milliseconds; return ``path``.

    Raises:
        RunError: if that fails.
    """
    rest = [Image.fromarray(frame) for frame in frames[1:]]
    return write_picture(path, frames[0], save_all=True, append_images=rest, duration=list(pauses), loop=0)


def write_picture(path: Path, pixels: np.ndarray[Any, Any], **options: Any) -> Path:
    """Write ``pixels`` ``[h, w, c]``, RGB or RGBA, whole or not at all, in the format of the suffix; return ``path``.

    Raises:
        RunError: if that fails.
    """
    try:
        replace_file(path, encode_picture(pixels, path.suffix, **options), durable=False)
    except OSError as error:
        raise RunError(f"could not write {path} ({error}): make room, or choose another folder") from error
    return path
