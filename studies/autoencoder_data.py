"""Pictures whose licences permit weights made from them to be published, as crops of 128 px in memory maps."""

import io
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from numpy.lib.format import open_memmap
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont

Image.MAX_IMAGE_PIXELS = None
SIDE, DRAWN = 128, 5_000
HELD_OUT = 16
"""One picture in so many, with all its crops, is used for evaluation only."""
FILTERS = (Image.Resampling.LANCZOS, Image.Resampling.BICUBIC, Image.Resampling.HAMMING)
PHOTOGRAPHS = ("Acrylic", "ColdWarm", "Dark_Ivy", "LightWaves", "Road", "SeaSunset")
"""Pictures of gnome-backgrounds 3.38 whose licences are listed in its file AUTHORS."""


@dataclass(frozen=True)
class Source:
    """Pictures of one licence, and how crops are cut from them."""

    licence: str
    pictures: list[Path] | list[bytes] | list[int]
    """Files, their contents, or the seeds of pictures drawn by program."""
    crops: int
    """Number of crops of each picture."""
    crop: Callable[[Image.Image, Generator], Image.Image]
    splits: bool = True
    """Whether some of the pictures are held out."""


def open_sources(packages: Path, emoji: Path) -> dict[str, Source]:
    """Return the sources by name, from unpacked Debian packages and the folder of a data set."""
    share = packages / "usr/share"
    gnome = [*share.glob("backgrounds/gnome/*.webp"), *share.glob("backgrounds/gnome/*.jpg")]
    photographs = [path for path in gnome if path.stem in PHOTOGRAPHS]
    abstract = [path for path in gnome if path.suffix == ".webp" and path.stat().st_size > 1000]
    plasma = [
        path
        for about in share.glob("wallpapers/*/metadata.*")
        if "CC-BY-SA-4.0" in about.read_text()
        for path in about.parent.glob("contents/images*/*")
    ]
    rows = datasets.load_dataset(str(emoji), split="train").cast_column("image", datasets.Image(decode=False))
    mate = share.glob("backgrounds/mate/desktop/Ubuntu-Mate-*")
    clip_art = share.glob("openclipart/png/**/*.png")
    return {
        "gnome-backgrounds 3.38": Source("CC0, CC-BY-SA-3.0", sorted(photographs), 1800, crop_photograph, splits=False),
        "gnome-backgrounds 43": Source("CC-BY-SA-3.0", sorted(abstract), 150, crop_photograph),
        "mate-backgrounds": Source("CC-BY-SA-4.0", sorted(mate), 150, crop_photograph),
        "plasma-workspace-wallpapers": Source("CC-BY-SA-4.0", sorted(plasma), 150, crop_photograph, splits=False),
        "openclipart-png": Source("public domain", sorted(clip_art), 3, crop_drawing),
        "fluent-emoji": Source("MIT", [row["bytes"] for row in rows["image"]], 6, crop_picture),
        "drawn by program": Source("none", list(range(DRAWN)), 3, crop_picture),
    }


def crop_photograph(image: Image.Image, rng: Generator) -> Image.Image:
    """Return a square at a scale between the native one and the whole picture."""
    most = min(image.size)
    side = math.exp(rng.uniform(math.log(min(SIDE, most)), math.log(most)))
    return _square(image, side, rng)


def crop_picture(image: Image.Image, rng: Generator) -> Image.Image:
    """Return a picture of 256 px, whole or in part."""
    side = image.width * (1.0 if rng.random() < 0.5 else rng.uniform(0.5, 1))
    return _square(image, side, rng)


def _square(image: Image.Image, side: float, rng: Generator) -> Image.Image:
    x, y = (rng.uniform(0, each - side) for each in image.size)
    return image.resize((SIDE, SIDE), FILTERS[rng.integers(3)], (x, y, x + side, y + side), reducing_gap=2)


def crop_drawing(image: Image.Image, rng: Generator) -> Image.Image:
    """Return a drawing, whole or in part, over white, a colour or a texture."""
    scale = rng.uniform(1, 1.25) if rng.random() < 0.6 else rng.uniform(0.25, 1)
    side = max(SIDE // 2, round(scale * max(image.size)))
    x, y = (round(rng.uniform(min(0, each - side), max(0, each - side))) for each in image.size)
    part = image.crop((x, y, x + side, y + side)).resize((SIDE, SIDE), FILTERS[rng.integers(3)])
    kind = rng.random()
    ground = texture(rng, SIDE) if kind < 0.25 else Image.new("RGB", part.size, "white" if kind < 0.75 else colour(rng))
    ground.paste(part, (0, 0), part)
    return ground


# Pictures drawn by program, at twice the side


def draw(rng: Generator, side: int = 2 * SIDE) -> Image.Image:
    """Return dead leaves, lines, text or a texture, under changing light, in vivid or pale colours."""
    kinds = (draw_leaves, draw_leaves, draw_leaves, draw_lines, draw_text, texture)
    image = kinds[rng.integers(len(kinds))](rng, side)
    if rng.random() < 0.3:
        light = np.asarray(gradient(rng, side), np.float32) / 255 + 0.3
        image = Image.fromarray(np.clip(np.asarray(image) * light, 0, 255).astype(np.uint8))
    image = ImageEnhance.Color(image).enhance(rng.uniform(0.1, 1) if rng.random() < 0.6 else 1)
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 4))) if rng.random() < 0.15 else image


def colour(rng: Generator) -> tuple[int, ...]:
    """Return a colour, at times a grey."""
    return tuple(rng.integers(0, 256, 3).tolist() if rng.random() < 0.7 else [int(rng.integers(0, 256))] * 3)


def gradient(rng: Generator, side: int) -> Image.Image:
    """Return a smooth change between four colours."""
    corners = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
    return corners.resize((side, side), Image.Resampling.BICUBIC, box=(0.25, 0.25, 1.75, 1.75))


def noise(rng: Generator, side: int) -> Image.Image:
    """Return noise whose spectrum is a power of the frequency, as that of photographs is."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)).astype(np.float32) + 1 / side
    spectrum = np.fft.rfft2(rng.standard_normal((3, side, side), np.float32)) / frequency ** np.float32(
        rng.uniform(0.6, 2)
    )
    fields = np.fft.irfft2(spectrum, s=(side, side))
    brightness, colours = rng.normal() * np.ones((3, 1)) * [1, 0, 0], rng.normal(size=(3, 3)) * rng.uniform(0.2, 1)
    mix = (brightness + colours).astype(np.float32) * rng.uniform(10, 45) / fields.std()
    pixels = np.tensordot(fields, mix, (0, 1)) + rng.uniform(60, 195, 3).astype(np.float32)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def waves(rng: Generator, side: int) -> Image.Image:
    """Return stripes or checks, soft or hard."""
    y, x = np.mgrid[:side, :side] * (2 * math.pi / rng.uniform(4, 40))
    c, s = math.cos(angle := rng.uniform(0, math.pi)), math.sin(angle)
    wave = np.sin(c * x + s * y) * (1 if rng.random() < 0.7 else np.sin(s * x - c * y))
    mask = Image.fromarray(np.clip(127 + rng.uniform(60, 600) * wave, 0, 255).astype(np.uint8))
    first, second = (Image.new("RGB", (side, side), colour(rng)) for _ in range(2))
    return Image.composite(first, second, mask)


def texture(rng: Generator, side: int) -> Image.Image:
    """Return noise, a gradient, waves or one colour."""
    kind = rng.integers(6)
    if kind == 5:
        return Image.new("RGB", (side, side), colour(rng))
    return (noise, noise, noise, gradient, waves)[kind](rng, side)


def outline(rng: Generator, side: int, size: float) -> list[tuple[float, float]]:
    """Return the corners of a closed outline, smooth or angular, somewhere in the picture."""
    angles = np.linspace(0, 2 * math.pi, int(rng.integers(3, 9)) if rng.random() < 0.4 else 40, endpoint=False)
    radius = size * (1 + sum(rng.uniform(0, 0.5) / k * np.cos(k * angles + rng.uniform(0, 6)) for k in range(1, 5)))
    shape = radius * np.exp(1j * angles)
    shape = (shape.real + 1j * rng.uniform(0.25, 1) * shape.imag) * np.exp(1j * rng.uniform(0, 6))
    x, y = rng.uniform(0, side, 2)
    return list(zip((x + shape.real).tolist(), (y + shape.imag).tolist(), strict=True))


def draw_leaves(rng: Generator, side: int) -> Image.Image:
    """Return dead leaves: plain and textured shapes that occlude each other, their sizes from a power law."""
    image, textures = texture(rng, side), [texture(rng, side) for _ in range(2)]
    softness = rng.uniform(0, 3) if rng.random() < 0.3 else 0
    sizes = 6 * rng.random(int(rng.integers(8, 120))) ** -rng.uniform(0.5, 1)
    for size in sorted(np.minimum(sizes, side / 2), reverse=True):
        points = outline(rng, side, size)
        if rng.random() < 0.35:
            mask = Image.new("L", image.size)
            ImageDraw.Draw(mask).polygon(points, fill=255)
            mask = mask.filter(ImageFilter.GaussianBlur(softness)) if softness else mask
            image.paste(textures[rng.integers(2)], (0, 0), mask)
        else:
            ImageDraw.Draw(image).polygon(points, colour(rng), colour(rng) if rng.random() < 0.3 else None)
    return image


def draw_lines(rng: Generator, side: int) -> Image.Image:
    """Return lines, walks and outlines of several widths."""
    image = texture(rng, side) if rng.random() < 0.4 else Image.new("RGB", (side, side), "white")
    ink = colour(rng) if rng.random() < 0.6 else (0, 0, 0)
    for _ in range(int(rng.integers(3, 30))):
        ink = colour(rng) if rng.random() < 0.2 else ink
        walk = rng.uniform(0, side, 2) + rng.normal(0, side / 12, (20, 2)).cumsum(0)
        closed = outline(rng, side, rng.uniform(4, side / 2))
        points = ([*closed, closed[0]], walk.ravel().tolist(), rng.uniform(0, side, 4).tolist())[rng.integers(3)]
        ImageDraw.Draw(image).line(points, ink, int(rng.integers(1, 9)), "curve")
    return image


FONTS = sorted(Path("/usr/share/fonts").rglob("*.ttf"))
LETTERS = list("etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLUCMFWYPVBGKJQXZ0123456789.,;:!?-()")


def draw_text(rng: Generator, side: int) -> Image.Image:
    """Return lines of letters in one font, on white or on a texture."""
    image = Image.new("RGB", (side, side), "white") if rng.random() < 0.5 else texture(rng, side)
    size = math.exp(rng.uniform(math.log(16), math.log(150)))
    font = ImageFont.truetype(FONTS[rng.integers(len(FONTS))], size)
    ink = (0, 0, 0) if rng.random() < 0.5 else colour(rng)
    y = -rng.uniform(0, size)
    while y < side:
        lengths = rng.integers(1, 9, 12)
        words = ["".join(LETTERS[int(len(LETTERS) * u**2)] for u in rng.random(length)) for length in lengths]
        ImageDraw.Draw(image).text((-rng.uniform(0, size), y), " ".join(words), ink, font)
        y += size * rng.uniform(1, 1.6)
    return image


# The memory maps


def is_held_out(source: Source, picture: Path | bytes | int) -> bool:
    """Return whether a picture is for the figures only."""
    name = picture if isinstance(picture, bytes) else str(getattr(picture, "stem", picture)).encode()
    return source.splits and zlib.crc32(name) % HELD_OUT == 0


def crops_of(source: Source, picture: Path | bytes | int) -> Iterator[NDArray[np.uint8]]:
    """Return the crops of a picture."""
    rng = default_rng(zlib.crc32(picture if isinstance(picture, bytes) else str(picture).encode()))
    if isinstance(picture, int):
        image = draw(rng)
    else:
        image = Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture)
        image = image.convert("RGBA" if source.crop is crop_drawing else "RGB")
    for _ in range(source.crops):
        yield np.asarray(source.crop(image, rng))


def build(folder: Path, packages: Path, emoji: Path) -> None:
    """Write the crops of all sources in their order, and ``sources.json`` last; nothing if that is there."""
    if (folder / "sources.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sources = open_sources(packages, emoji)
    table: dict[str, dict[str, str | int]] = {name: {"licence": each.licence} for name, each in sources.items()}
    for part in ("training", "held_out"):
        chosen = {
            name: [each for each in source.pictures if is_held_out(source, each) == (part == "held_out")]
            for name, source in sources.items()
        }
        count = sum(len(pictures) * sources[name].crops for name, pictures in chosen.items())
        crops = open_memmap(folder / f"{part}.npy", "w+", np.uint8, (count, SIDE, SIDE, 3))
        row = 0
        for name, pictures in chosen.items():
            table[name][part] = len(pictures) * sources[name].crops
            table[name][f"{part} pictures"] = len(pictures)
            print(part, name, table[name][part], flush=True)
            for picture in pictures:
                for crop in crops_of(sources[name], picture):
                    crops[row] = crop
                    row += 1
    (folder / "sources.json").write_text(json.dumps(table, indent=1))
