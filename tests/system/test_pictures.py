"""Pictures are opened whatever else is in their files, within limits."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from rectified_flow.system.pictures import Panel, _draw, open_picture

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


def test_a_device_is_not_opened() -> None:
    with pytest.raises(OSError, match="is not a regular file"):
        open_picture(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({1: 30.0, 3: 20.0, 24: 11.0}, (["1", "3", "24"], ["20", "30"])),
        (
            {number: 1000.0 / number**2 for number in range(1, 33)},
            (["1", "2", "4", "8", "16", "32"], ["1", "10", "100", "1000"]),
        ),
    ],
)
def test_labels_of_logarithmic_axes_do_not_overlap(
    points: dict[int, float], expected: tuple[list[str], list[str]]
) -> None:
    """Few points all have a label; many points, and powers of 10 that are far apart, have no labels between."""
    figure = Figure()
    axes = figure.subplots()
    _draw(axes, Panel({"a": points}, "title", "x", "y", log_x=True, log_y=True))
    figure.draw_without_rendering()
    for axis, labels in zip((axes.xaxis, axes.yaxis), expected, strict=True):
        low, high = axis.get_view_interval()
        ticks = [tick for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()) if low <= tick.get_loc() <= high]
        texts = [tick.label1.get_text() for tick in ticks]
        assert sorted((text for text in texts if text), key=float) == labels
