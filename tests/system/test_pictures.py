"""Pictures are opened whatever else is in their files, within limits."""

from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from rectified_flow.system.pictures import open_picture

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
