"""The colours of picture files, converted to sRGB.

A file declares its colours by an ICC profile, by the chunks gAMA and cHRM of PNG, or by the tags of cameras for Adobe
RGB. Profiles are compared with sRGB by the colours that they give, since names are unreliable: GIMP's linear profile
is called "GIMP built-in Linear sRGB". Without a declaration, the colours are those of sRGB.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms

SRGB = ImageCms.createProfile("sRGB")
TOLERANCE = 3
"""Largest difference from sRGB of a profile that leaves a picture unchanged [levels of 256]: descriptions of sRGB
differ by rounding, and a conversion would only add more of it."""
MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Pillow's mode for pixels in the colour space of a profile."""
BAD_EXIF = (SyntaxError, struct.error, ValueError, KeyError, TypeError)
"""Errors that Pillow raises if a block of Exif is damaged; the image itself may be undamaged."""
INTEROPERABILITY, ADOBE_RGB_INDEX = 1, "R03"  # tag and value by which DCF declares Adobe RGB (CIPA DC-009)
COLOR_SPACE, ADOBE_RGB_SPACE = 0xA001, 2  # tag of Exif, and the value that cameras write for Adobe RGB
XY = tuple[float, float]
PRIMARIES_OF_SRGB: tuple[XY, XY, XY, XY] = ((0.3127, 0.3290), (0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
PRIMARIES_OF_ADOBE_RGB: tuple[XY, XY, XY, XY] = ((0.3127, 0.3290), (0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
"""Chromaticities of white, red, green and blue (IEC 61966-2-1; Adobe RGB (1998), 4.3)."""
GAMMA_OF_ADOBE_RGB = 563 / 256
ALIKE = 0.05  # relative difference from 1/2.2 of a gamma that stands for the curve of sRGB, as in libpng


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return an image in the colours of sRGB; a damaged profile is ignored.

    Args:
        image: the image.
        profile: its colours, see :func:`profile_of`.
    """
    if profile is None:
        return image
    with suppress(OSError, TypeError, ValueError, ImageCms.PyCMSError):
        found = _transform(profile)
        if found is not None:
            mode, transform = found
            has_alpha = image.has_transparency_data
            opaque = image.convert("RGB") if image.mode in ("P", "PA") else image
            converted = transform.apply(_in_mode(opaque, mode))
            if has_alpha:
                converted.putalpha(image.convert("RGBA").getchannel("A"))
            return converted
    return image


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return an image without its transparency in the mode of a profile: one for RGB describes greys, too."""
    is_grey = image.mode in ("1", "L", "LA", "La")
    if (mode == "L" and not is_grey) or (mode == "CMYK" and image.mode != "CMYK"):
        raise ValueError(f"a profile for pixels of mode {mode} does not suit pixels of mode {image.mode}")
    return image.convert(mode)


def profile_of(image: Image.Image) -> bytes | None:
    """Return the ICC profile of the colours that the file of an image declares; None for those of sRGB."""
    if "icc_profile" in image.info:
        return image.info["icc_profile"] or None
    if "srgb" in image.info:
        return None
    if "gamma" in image.info or "chromaticity" in image.info:  # 1/gamma is the exponent from values to light
        gamma, points = image.info.get("gamma", 1 / 2.2), image.info.get("chromaticity")
        with suppress(ValueError, TypeError, ZeroDivisionError, np.linalg.LinAlgError):
            primaries = tuple(zip(points[::2], points[1::2], strict=True)) if points else PRIMARIES_OF_SRGB
            return _made_profile(primaries, None if abs(2.2 * gamma - 1) <= ALIKE else 1 / gamma)
        return None
    return _made_profile(PRIMARIES_OF_ADOBE_RGB, GAMMA_OF_ADOBE_RGB) if _is_adobe_rgb(image) else None


def _is_adobe_rgb(image: Image.Image) -> bool:
    """Return whether the Exif block of an image declares Adobe RGB, as cameras do without a profile."""
    with suppress(*BAD_EXIF):
        exif = image.getexif()
        if not exif:
            return False
        index = exif.get_ifd(ExifTags.IFD.Interop).get(INTEROPERABILITY)
        space = exif.get_ifd(ExifTags.IFD.Exif).get(COLOR_SPACE)
        return str(index).startswith(ADOBE_RGB_INDEX) or space == ADOBE_RGB_SPACE
    return False


@lru_cache(maxsize=64)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform] | None:
    """Return the mode of the pixels that a profile is for, and their transform to sRGB; None if it changes nothing."""
    opened = ImageCms.ImageCmsProfile(BytesIO(profile))
    mode = MODES.get(str(opened.profile.xcolor_space).strip())
    if mode is None:
        return None
    transform = ImageCms.buildTransform(opened, SRGB, mode, "RGB")
    if mode == "CMYK":
        return mode, transform
    levels = np.arange(0, 256, 17, dtype=np.uint8)
    probe = levels[None] if mode == "L" else np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(16, -1, 3)
    before = Image.fromarray(probe)
    after = np.asarray(transform.apply(before), dtype=int)
    differences = np.abs(after - np.asarray(before.convert("RGB"), dtype=int))
    return None if differences.max() <= TOLERANCE else (mode, transform)


@lru_cache(maxsize=64)
def _made_profile(primaries: Sequence[XY], exponent: float | None) -> bytes:
    """Return an ICC profile of RGB by chromaticities and by the exponent from values to light, or the curve of sRGB.

    The profile has the version 4.3 of the ICC (ICC.1:2010), whose white is D50; colours are adapted by Bradford's
    transform.

    Raises:
        ValueError: if the chromaticities or the exponent are those of no display.
    """
    if exponent is not None and not 0.1 <= exponent <= 10:
        raise ValueError(f"the exponent {exponent} is that of no display")
    curve = (0, exponent) if exponent is not None else (3, 2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    trc = b"para\0\0\0\0" + struct.pack(">HH", int(curve[0]), 0) + b"".join(map(_fixed, curve[1:]))
    red, green, blue = _to_d50(primaries).T
    texts = {b"desc": "RGB by chromaticities", b"cprt": "none"}
    tags = {name: _localised(text) for name, text in texts.items()}
    tags |= {name: b"XYZ \0\0\0\0" + b"".join(map(_fixed, xyz)) for name, xyz in ((b"wtpt", D50), (b"rXYZ", red))}
    tags |= {name: b"XYZ \0\0\0\0" + b"".join(map(_fixed, xyz)) for name, xyz in ((b"gXYZ", green), (b"bXYZ", blue))}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), trc)
    place, table, content = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, tag in tags.items():
        table += name + struct.pack(">II", place + len(content), len(tag))
        content += tag + b"\0" * (-len(tag) % 4)
    head = struct.pack(">4xI", 0x04300000) + b"mntrRGB XYZ " + struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp"
    head = (head + bytes(28) + b"".join(map(_fixed, D50))).ljust(124, b"\0")
    return struct.pack(">I", place + len(content)) + head + table + content


D50 = (0.9642, 1.0, 0.8249)
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def _to_d50(primaries: Sequence[XY]) -> NDArray[np.float64]:
    """Return the matrix ``[3, 3]`` from linear RGB to XYZ with the white D50, by chromaticities."""
    white, *colours = (np.array([x / y, 1, (1 - x - y) / y]) for x, y in primaries)
    columns = np.stack(colours, axis=1)
    matrix = columns * np.linalg.solve(columns, white)
    cones = np.diag((BRADFORD @ np.array(D50)) / (BRADFORD @ white))
    adapted: NDArray[np.float64] = np.linalg.solve(BRADFORD, cones @ BRADFORD @ matrix)
    if not np.isfinite(adapted).all() or np.abs(adapted).max() > 10:
        raise ValueError("the chromaticities are those of no display")
    return adapted


def _fixed(number: float) -> bytes:
    """Return a number with 16 bits before and 16 after the point."""
    return struct.pack(">i", round(number * 65536))


def _localised(text: str) -> bytes:
    """Return a text as a tag of a profile, in one language."""
    content = text.encode("utf-16-be")
    return b"mluc\0\0\0\0" + struct.pack(">II", 1, 12) + b"enUS" + struct.pack(">II", len(content), 28) + content
