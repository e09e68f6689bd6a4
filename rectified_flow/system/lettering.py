r"""Texts in pictures: a font that has the letters of a text, lines that fit, and the picture of the lines.

The letters are those of DejaVu Sans, which matplotlib contains: the scripts of Europe, Arabic and Hebrew. For other
scripts, a font of the system is used if there is one. A letter that no font has is drawn as its escape, like
``\u732b``, so that two names never look the same.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rectified_flow.system.terminal import CONTROLS

SYSTEM_FONTS = (
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKjp-Regular.otf", "DroidSansFallbackFull.ttf", "wqy-microhei.ttc"),
    *("wqy-zenhei.ttc", "NotoSansThai-Regular.ttf", "NotoSansDevanagari-Regular.ttf", "Arial Unicode.ttf"),
    *("PingFang.ttc", "msyh.ttc", "msgothic.ttc", "malgun.ttf"),
)
"""Files of fonts with further scripts, as Linux, macOS and Windows call them, in the order in which they are tried."""
NO_LETTER = "\U0010fffd"  # a private character, which fonts draw as a missing letter
SPACING = 3  # between two lines [px]
MARGIN = 2  # at the left [px]
BREAKS = re.compile(r"\S+\s*")


@cache
def find_font(name: str, size: int) -> ImageFont.FreeTypeFont | None:
    """Return the font in a file of this name, in a folder of fonts or by its path; None if there is none."""
    try:
        return ImageFont.truetype(name, size)
    except OSError:
        return None


@cache
def default_font(size: int) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans of a size [px]."""
    spec = find_spec("matplotlib")  # without loading it, which takes a second
    folder = Path((spec and spec.origin) or "").parent
    font = find_font(str(folder / "mpl-data/fonts/ttf/DejaVuSans.ttf"), size)
    if font is None:
        raise FileNotFoundError(f"{folder} has no DejaVuSans.ttf: install matplotlib again")
    return font


@cache
def has_letter(font: ImageFont.FreeTypeFont, letter: str) -> bool:
    """Return whether a font has a letter."""
    return letter.isspace() or bytes(font.getmask(letter)) != bytes(font.getmask(NO_LETTER))


def lettering(text: str, size: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """Return a text, with escapes for letters that the font lacks, and the font that has the most of its letters."""
    text = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    fonts = [default_font(size)]
    missing = [letter for letter in dict.fromkeys(text) if not has_letter(fonts[0], letter)]
    if missing:
        fonts += [font for name in SYSTEM_FONTS if (font := find_font(name, size)) is not None]
    font = max(fonts, key=lambda each: sum(has_letter(each, letter) for letter in {*text}))  # the first of the best
    drawn = (each if has_letter(font, each) else each.encode("unicode_escape").decode() for each in text)
    return "".join(drawn), font


def wrapped(text: str, width: int, size: int) -> tuple[list[str], ImageFont.FreeTypeFont]:
    """Break a text into lines of at most ``width`` [px], between words if possible, and return them with their font."""
    text, font = lettering(text, size)
    lines = list[str]()
    for paragraph in text.split("\n"):
        line = ""
        for word in BREAKS.findall(paragraph):
            if line and font.getlength((line + word).rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += word
            while font.getlength(line.rstrip()) > width and len(line) > 1:  # a word that is wider than a line
                fits = next(n for n in range(len(line) - 1, 0, -1) if n == 1 or font.getlength(line[:n]) <= width)
                lines.append(line[:fits])
                line = line[fits:]
        lines.append(line.rstrip())
    return lines, font


def text_picture(text: str, width: int, size: int, lines: int | None = None) -> Tensor:
    """Return a text, black on white and broken into lines that fit, as a picture uint8 ``[3, height, width]``.

    Args:
        text: the text; a line break in it begins a new line.
        width: width of the picture [px].
        size: size of the letters [px].
        lines: height of the picture in lines; a longer text ends in ``...``. As high as the text if not given.
    """
    broken, font = wrapped(text, width - 2 * MARGIN, size)
    height = (len(broken) if lines is None else lines) * (size + SPACING)
    if lines is not None and len(broken) > lines:
        broken = [*broken[: lines - 1], broken[lines - 1][:-3] + "..."]
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(broken):
        draw.text((MARGIN, number * (size + SPACING)), line, "black", font)
    return torch.from_numpy(np.array(image)).movedim(-1, 0)
