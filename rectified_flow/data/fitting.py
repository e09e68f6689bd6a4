"""One picture of any mode and size, as a store keeps it."""

import struct
from contextlib import suppress

import numpy as np
from PIL import ExifTags, Image, ImageOps

from rectified_flow.data.framing import Framing
from rectified_flow.system.pictures import over_white

TURNED = (5, 6, 7, 8)
"""Values of the orientation tag that exchange width and height."""
TURNED_BY_PILLOW = ("TIFF",)
"""Formats whose ``size`` has them exchanged already."""
BAD_EXIF = (SyntaxError, struct.error, ValueError, KeyError, TypeError)
"""What Pillow raises where the block that has the orientation is damaged; the picture itself may be well."""


def fit(image: Image.Image, framing: Framing) -> Image.Image:
    """Return ``image`` upright, in RGB or RGBA, resized and cropped or padded to ``framing.stored_size``.

    Without alpha, transparent parts become white. With it, fully transparent pixels have the colour white, so that no
    colours are learned which nobody sees. Pillow resizes RGBA with premultiplied alpha, so these leave no halo.

    Raises:
        ValueError: if the range of the pixels is unknown.
    """
    size = framing.stored_size
    image.draft("RGB", (2 * max(size), 2 * max(size)))  # JPEG then decodes at a fraction of its size; others ignore it
    with suppress(*BAD_EXIF):
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    image = image.convert("RGBA") if framing.alpha else over_white(image)
    whole = framing.crop == "none"
    image = _padded(image, size) if whole else ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    return _with_hidden_white(image) if framing.alpha else image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of a picture that is not decoded yet, once its orientation is applied [px]."""
    turned = False
    with suppress(*BAD_EXIF):
        turned = image.format not in TURNED_BY_PILLOW and image.getexif().get(ExifTags.Base.Orientation) in TURNED
    return (image.height, image.width) if turned else image.size


def _padded(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """All of ``image``, as large as fits into ``size``, at the centre."""
    scale = min(size[0] / image.width, size[1] / image.height)
    inner = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    canvas = Image.new(image.mode, size, (255, 255, 255, 0)[: len(image.mode)])
    corner = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    canvas.paste(image.resize(inner, Image.Resampling.LANCZOS), corner)
    return canvas


def _with_hidden_white(image: Image.Image) -> Image.Image:
    pixels = np.array(image)
    pixels[pixels[..., 3] == 0, :3] = 255
    return Image.fromarray(pixels)
