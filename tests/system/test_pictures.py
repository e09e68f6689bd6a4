"""Tests of opening pictures within limits, and of printing characters that a terminal cannot show."""

import io
import sys
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from rectified_flow.system.pictures import open_picture
from rectified_flow.system.terminal import escape_unencodable, escaped

MEGABYTE = 2**20


def save_with_text(path: Path, *megabytes: int) -> Path:
    info = PngImagePlugin.PngInfo()
    for number, length in enumerate(megabytes):
        add = info.add_itxt if number % 2 else info.add_text
        add(f"Comment {number}", "x" * length * MEGABYTE, zip=True)
    Image.new("RGB", (4, 4), "red").save(path, pnginfo=info)
    return path


def test_a_png_may_hold_long_texts(tmp_path: Path) -> None:
    """Pillow's own limit is 1 MB for each."""
    with open_picture(save_with_text(tmp_path / "a.png", 3, 5)) as image:
        assert image.convert("RGB").getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("megabytes", [(65,), (40, 25)])
def test_a_png_that_fills_the_memory_with_text_is_refused(tmp_path: Path, megabytes: tuple[int, ...]) -> None:
    file = save_with_text(tmp_path / "a.png", *megabytes)
    assert file.stat().st_size < MEGABYTE
    with pytest.raises(ValueError, match=r"too large|Too much memory"), open_picture(file) as image:
        image.load()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    escape_unencodable()
    print("runs/\u82b1/caf\u00e9, not UTF-8: \udce9", flush=True)
    expected = "runs/\u82b1/caf\u00e9, not UTF-8: \udce9\n".encode(encoding, "backslashreplace")
    assert written.getvalue() == expected


def test_characters_that_control_a_terminal_are_escaped() -> None:
    assert escaped("a\tb\nc\x1b[31m\u202ed") == "a\tb\nc\\x1b[31m\\u202ed"
