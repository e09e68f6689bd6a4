"""Tests of colours that files declare, against the formulas of their standards."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, PngImagePlugin

from rectified_flow.system import colour
from rectified_flow.system.pictures import fit

COLOURS = np.array([[10, 10, 10], [55, 128, 200], [128, 128, 128], [180, 200, 90]], np.uint8)
SRGB, ADOBE_RGB = colour.PRIMARIES_OF_SRGB, colour.PRIMARIES_OF_ADOBE_RGB
# Matrices from linear RGB to XYZ for the white D65: IEC 61966-2-1 and Adobe RGB (1998), 4.3.5.3.
FROM_SRGB = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
FROM_ADOBE_RGB = np.array([[0.57667, 0.18556, 0.18823], [0.29734, 0.62736, 0.07529], [0.02703, 0.07069, 0.99134]])


def encoded(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of sRGB [levels of 256] for linear light in [0, 1]."""
    light = light.clip(0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


LINEAR = encoded(COLOURS / 255)
ADOBE = encoded((COLOURS / 255) ** (563 / 256) @ FROM_ADOBE_RGB.T @ np.linalg.inv(FROM_SRGB).T)


def chunk(name: bytes, *numbers: float) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add(name, b"".join(round(100_000 * number).to_bytes(4, "big") for number in numbers))
    return info


def named(profile: bytes, name: str) -> bytes:
    """The profile with another name of the same length as its own."""
    return profile.replace("RGB by chromaticities".encode("utf-16-be"), name.encode("utf-16-be"))


def fitted(file: Path) -> NDArray[np.float64]:
    with Image.open(file) as image:
        return np.asarray(fit(image, (4, 1)), dtype=float)[0]


def picture(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(COLOURS[None]).convert(mode)


@pytest.mark.parametrize("name", ["Linear sRGB built-in ", "a display of any name"])
def test_a_profile_counts_by_its_values(name: str, tmp_path: Path) -> None:
    """GIMP's linear profile has sRGB in its name."""
    profile = named(colour._made_profile(SRGB, 1.0), name)
    assert name in ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(BytesIO(profile)))
    picture().save(tmp_path / "a.png", icc_profile=profile)
    assert fitted(tmp_path / "a.png") == pytest.approx(LINEAR, abs=1)


@pytest.mark.parametrize(
    "make", [lambda: colour._made_profile(SRGB, None), ImageCms.ImageCmsProfile(colour.SRGB).tobytes]
)
def test_a_profile_of_srgb_changes_nothing(make: object, tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png", icc_profile=make())  # type: ignore[operator]
    assert fitted(tmp_path / "a.png") == pytest.approx(COLOURS)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_adobe_rgb_by_a_profile(suffix: str, tmp_path: Path) -> None:
    picture().save(tmp_path / f"a.{suffix}", icc_profile=colour._made_profile(ADOBE_RGB, 563 / 256))
    assert fitted(tmp_path / f"a.{suffix}") == pytest.approx(ADOBE, abs=1.5)


@pytest.mark.parametrize("tag", ["R03", "ColorSpace", "R98"])
def test_adobe_rgb_by_the_tags_of_a_camera(tag: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    if tag == "ColorSpace":
        exif.get_ifd(ExifTags.IFD.Exif)[colour.COLOR_SPACE] = colour.ADOBE_RGB_SPACE
    else:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.IFD.Interop] = {1: tag}
    picture().resize((32, 8), Image.Resampling.NEAREST).save(tmp_path / "a.jpg", quality=100, subsampling=0, exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        kind = image.getexif().get_ifd(ExifTags.IFD.Interop).get(1)
        assert kind == (None if tag == "ColorSpace" else tag)
        values = np.asarray(fit(image, (32, 8)), dtype=float)[4, 4::8]
    assert values == pytest.approx(COLOURS.astype(float) if tag == "R98" else ADOBE, abs=4)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (chunk(b"gAMA", 1.0), LINEAR),
        (chunk(b"gAMA", 0.45455), COLOURS),  # the curve of sRGB, as programs mean it
        (chunk(b"gAMA", 0.0), COLOURS),
        (chunk(b"cHRM", *(number for point in SRGB for number in point)), COLOURS),
        (chunk(b"cHRM", *(number for point in SRGB for number in (point[0], 0))), COLOURS),
    ],
)
def test_gamma_and_chromaticities_of_png(
    chunks: PngImagePlugin.PngInfo, expected: NDArray[np.float64], tmp_path: Path
) -> None:
    picture().save(tmp_path / "a.png", pnginfo=chunks)
    assert fitted(tmp_path / "a.png") == pytest.approx(expected.astype(float), abs=1)


def test_primaries_of_png(tmp_path: Path) -> None:
    chunks = chunk(b"gAMA", 256 / 563 * 0.8)
    chunks.add(b"cHRM", b"".join(round(100_000 * x).to_bytes(4, "big") for point in ADOBE_RGB for x in point))
    picture().save(tmp_path / "a.png", pnginfo=chunks)
    expected = encoded((COLOURS / 255) ** (563 / 256 / 0.8) @ FROM_ADOBE_RGB.T @ np.linalg.inv(FROM_SRGB).T)
    assert fitted(tmp_path / "a.png") == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P"])
def test_profiles_of_pictures_of_other_modes(mode: str, tmp_path: Path) -> None:
    image = picture(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(np.array([[255, 255, 255, 0]], np.uint8)))
    values = np.asarray(picture(mode).convert("RGB"), dtype=float)[0]
    image.save(tmp_path / "a.png", icc_profile=colour._made_profile(SRGB, 1.0))
    expected = encoded(values / 255)
    if mode in ("LA", "RGBA"):
        expected[3] = 255
    assert fitted(tmp_path / "a.png") == pytest.approx(expected, abs=1)


def grey_profile() -> bytes:
    """A linear profile of grey: the curve of a profile of RGB, and its white."""
    rgb = colour._made_profile(SRGB, 1.0)
    return rgb[:16] + b"GRAY" + rgb[20:].replace(b"rTRC", b"kTRC")


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_profiles_of_grey(mode: str, tmp_path: Path) -> None:
    picture(mode).save(tmp_path / "a.png", icc_profile=grey_profile())
    values = np.asarray(picture(mode).convert("RGB"), dtype=float)[0]
    assert fitted(tmp_path / "a.png") == pytest.approx(encoded(values / 255), abs=1)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_damaged_profile_is_ignored(mode: str, tmp_path: Path) -> None:
    for number, profile in enumerate((b"nothing", colour._made_profile(SRGB, 1.0)[:200])):
        picture(mode).save(tmp_path / f"{number}.png", icc_profile=profile)
        assert fitted(tmp_path / f"{number}.png") == pytest.approx(np.asarray(picture(mode).convert("RGB"), float)[0])
