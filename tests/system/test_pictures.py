"""Tests of pictures of any mode and size as rows of a store, and of characters that a terminal cannot show."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from rectified_flow.data.framing import Framing, parse_ratio
from rectified_flow.errors import UsageError
from rectified_flow.system import pictures
from rectified_flow.system.pictures import open_picture, upright_size
from rectified_flow.system.terminal import prepare_streams, shown

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
    prepare_streams()
    print("runs/\u82b1/caf\u00e9, not UTF-8: \udce9", flush=True)
    expected = "runs/\u82b1/caf\u00e9, not UTF-8: \udce9\n".encode(encoding, "backslashreplace")
    assert written.getvalue() == expected


def test_characters_that_control_a_terminal_are_escaped() -> None:
    assert shown("a\tb\nc\x1b[31m\u202ed") == "a\tb\nc\\x1b[31m\\u202ed"


ORANGE = (200, 100, 0)


def fit(image: Image.Image, framing: Framing) -> Image.Image:
    return pictures.fit(image, framing.stored_size, mode="RGBA" if framing.alpha else "RGB", pad=framing.crop == "none")


def square(side: int) -> Framing:
    return Framing(side, side)


def saved(image: Image.Image, path: Path, **options: object) -> Image.Image:
    """Save an image, and return the image that is read from the file."""
    image.save(path, **options)  # type: ignore[arg-type]
    return Image.open(path)


def test_the_centre_by_the_short_side() -> None:
    image = Image.new("RGB", (30, 10), "black")
    image.paste((255, 255, 255), (10, 0, 20, 10))
    assert np.asarray(fit(image, square(5))).min() > 200
    assert fit(image, square(5)).size == (5, 5)
    columns = np.asarray(fit(image, Framing(6, 3)))[:, :, 0].mean(axis=0)
    assert columns == pytest.approx([0, 128, 255, 255, 128, 0], abs=9), "the middle 20 px of 30"


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize(
    ("mode", "colour", "expected", "suffix"),
    [
        ("1", 255, (255, 255, 255), "png"),
        ("L", 77, (77, 77, 77), "png"),
        ("L", 77, (77, 77, 77), "jpg"),
        ("P", 0, ORANGE, "png"),
        ("P", 0, ORANGE, "gif"),
        ("RGB", ORANGE, ORANGE, "webp"),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0), "jpg"),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0), "tif"),
        ("YCbCr", (255, 128, 128), (255, 255, 255), "jpg"),
        ("I;16", 20_000, (77, 77, 77), "png"),
        ("I;16", 20_000, (77, 77, 77), "tif"),
    ],
)
def test_opaque_files_of_every_mode(
    tmp_path: Path, mode: str, colour: int, expected: tuple[int, ...], suffix: str, alpha: bool
) -> None:
    image = Image.new(mode, (8, 6), colour)
    if mode == "P":
        image.putpalette([*ORANGE, 0, 0, 0])
    fitted = np.asarray(fit(saved(image, tmp_path / f"a.{suffix}"), Framing(4, 4, alpha)))
    assert fitted.shape == (4, 4, 3 + alpha)
    assert fitted[..., :3].reshape(-1, 3) == pytest.approx(np.tile(expected, (16, 1)), abs=5)
    assert not alpha or (fitted[..., 3] == 255).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range(mode: str) -> None:
    with pytest.raises(ValueError, match="no known range"):
        fit(Image.new(mode, (8, 6)), square(4))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_becomes_white_or_stays(mode: str, tmp_path: Path) -> None:
    if mode == "P":
        image = Image.new("P", (8, 8), 1)
        image.putpalette([*ORANGE, 9, 9, 9])
        file = saved(image, tmp_path / "a.png", transparency=1)
    else:
        file = saved(Image.new(mode, (8, 8), (9, 9, 9, 0)[-len(mode) :]), tmp_path / "a.png")
    assert fit(file, square(4)).getpixel((0, 0)) == (255, 255, 255)
    assert fit(Image.open(tmp_path / "a.png"), Framing(4, 4, alpha=True)).getpixel((0, 0)) == (255, 255, 255, 0)


def test_invisible_colours_are_not_learned_and_leave_no_halo() -> None:
    """Green noise that nobody sees, beside a red shape whose edge is cut through by the new pixels."""
    pixels = np.zeros((30, 30, 4), np.uint8)
    pixels[..., 1] = np.random.default_rng(0).integers(256, size=(30, 30))
    pixels[:, 10:] = (255, 0, 0, 255)
    fitted = np.asarray(fit(Image.fromarray(pixels), Framing(8, 8, alpha=True)))
    hidden, edge = fitted[..., 3] == 0, (fitted[..., 3] > 20) & (fitted[..., 3] < 235)
    assert hidden.any()
    assert edge.any()
    assert (fitted[hidden] == (255, 255, 255, 0)).all()
    assert np.abs(fitted[edge][:, :3].astype(int) - (255, 0, 0)).max() <= 12


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 8), "black")
    image.paste((255, 255, 255), (0, 0, 16, 4))  # bright above, but the camera lay on its side
    exif = Image.Exif()
    exif[0x0112] = 6
    for suffix in ("png", "jpg", "tif"):
        photo = saved(image, tmp_path / f"photo.{suffix}", exif=exif)
        assert upright_size(photo) == (8, 16)
        upright = np.asarray(fit(photo, square(8)))[..., 0]
        assert upright[:, 6:].min() > 200
        assert upright[:, :2].max() < 50
        assert fit(Image.open(tmp_path / f"photo.{suffix}"), Framing(4, 8)).size == (4, 8)


def test_a_photograph_with_a_damaged_orientation_is_taken_as_it_is(tmp_path: Path) -> None:
    for suffix in ("png", "jpg", "webp"):
        photo = saved(Image.new("RGB", (16, 8), "white"), tmp_path / f"photo.{suffix}", exif=b"Exif\0\0no TIFF header")
        assert upright_size(photo) == (16, 8)
        assert np.asarray(fit(photo, square(8))).min() == 255


@pytest.mark.parametrize(("alpha", "pad"), [(False, (255, 255, 255)), (True, (255, 255, 255, 0))])
def test_the_whole_picture_is_padded(alpha: bool, pad: tuple[int, ...]) -> None:
    fitted = fit(Image.new("RGB", (30, 10), "black"), Framing(9, 9, alpha, "none"))
    rows = np.asarray(fitted)
    assert (rows[[0, 1, 2, 6, 7, 8]] == pad).all()
    assert (rows[3:6, :, :3] == 0).all()
    assert fit(Image.new("RGB", (4000, 1)), Framing(8, 8, crop="none")).size == (8, 8)


def test_a_random_crop_has_a_margin() -> None:
    framing = Framing(12, 8, crop="random")
    assert fit(Image.new("RGB", (30, 30)), framing).size == framing.stored_size == (15, 10)
    assert (framing.shape, framing.stored_size) == ((3, 8, 12), (15, 10))


def test_what_is_enlarged() -> None:
    assert Framing(12, 8).enlarges(11, 99)
    assert Framing(12, 8).enlarges(99, 7)
    assert not Framing(12, 8).enlarges(12, 8)
    assert Framing(12, 8, crop="random").enlarges(14, 10)
    assert not Framing(12, 8, crop="none").enlarges(12, 3)
    assert Framing(12, 8, crop="none").enlarges(11, 7)


def test_sides() -> None:
    assert Framing.of(64, "6:4") == Framing(96, 64)
    assert Framing.of(27, "9:16") == Framing(27, 48)
    assert Framing.of(64, "2:2") == Framing(64, 64)
    with pytest.raises(UsageError, match="64 with `aspect_ratio` 16:9 gives a fractional long side; pass a"):
        Framing.of(64, "16:9")


@pytest.mark.parametrize("text", ["3", "0:1", "3:", "a:b", "-3:2", "3:2:1", "1.5:1", "3 : 2", "10000:1", ""])
def test_no_ratio(text: str) -> None:
    with pytest.raises(UsageError, match=f"`aspect_ratio` is {text}; it must be width:height"):
        parse_ratio(text)
