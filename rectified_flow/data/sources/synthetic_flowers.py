"""Synthetic flowers: thousands of distinct, labelled images, drawn from a seed without a download."""

from colorsys import rgb_to_hsv
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from typing_extensions import override

from rectified_flow.data.sources import ImageSource

SYNTHETIC_FLOWERS = "synthetic-flowers"
SYNTHETIC_VERSION = 1

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Species:
    """Parameters of one class of flowers. Lengths are in units of the flower's radius; colours are RGB in [0, 1]."""

    name: str
    colour: str
    petals: int
    notch: float
    """Depth of the gaps between petals, 0 (none) to 1 (down to the disc)."""
    point: float
    """Exponent of the petals' outline: below 1 blunt, above 1 pointed."""
    petal: Colour
    tip: Colour
    disc: Colour
    disc_radius: float
    background: Colour
    rows: int = 1
    """Number of rings of petals; the inner rings are smaller and rotated by half a petal."""


SPECIES = (
    Species("daisy", "white", 13, 0.75, 0.5, (0.97, 0.97, 0.95), (1.0, 1.0, 1.0), (0.95, 0.76, 0.12), 0.30, (0.25, 0.50, 0.22)),
    Species("sunflower", "yellow", 18, 0.5, 1.1, (0.98, 0.72, 0.05), (1.0, 0.85, 0.2), (0.32, 0.18, 0.08), 0.46, (0.45, 0.67, 0.9)),
    Species("poppy", "red", 4, 0.25, 0.4, (0.86, 0.10, 0.08), (0.95, 0.25, 0.15), (0.12, 0.10, 0.12), 0.22, (0.35, 0.52, 0.25)),
    Species("violet", "purple", 5, 0.55, 0.5, (0.42, 0.20, 0.70), (0.62, 0.42, 0.88), (0.98, 0.85, 0.25), 0.14, (0.20, 0.35, 0.20)),
    Species("rose", "pink", 6, 0.2, 0.4, (0.88, 0.18, 0.38), (0.98, 0.48, 0.58), (0.72, 0.08, 0.25), 0.16, (0.16, 0.30, 0.18), 3),
    Species("cornflower", "blue", 10, 0.8, 0.8, (0.16, 0.30, 0.85), (0.40, 0.55, 0.98), (0.25, 0.12, 0.45), 0.24, (0.82, 0.78, 0.5)),
    Species("lily", "orange", 6, 0.85, 1.3, (0.98, 0.55, 0.12), (1.0, 0.72, 0.35), (0.60, 0.25, 0.05), 0.12, (0.14, 0.28, 0.30)),
    Species("cherry", "pink", 5, 0.5, 0.45, (0.98, 0.74, 0.82), (1.0, 0.90, 0.94), (0.85, 0.35, 0.45), 0.13, (0.62, 0.80, 0.95)),
    Species("gentian", "blue", 5, 0.65, 1.2, (0.10, 0.15, 0.60), (0.25, 0.40, 0.85), (0.92, 0.95, 0.98), 0.18, (0.58, 0.60, 0.55)),
    Species("buttercup", "yellow", 5, 0.3, 0.4, (0.99, 0.86, 0.08), (1.0, 0.95, 0.45), (0.75, 0.65, 0.05), 0.20, (0.30, 0.60, 0.20)),
    Species("dahlia", "purple", 12, 0.45, 0.9, (0.70, 0.08, 0.45), (0.95, 0.55, 0.80), (0.98, 0.75, 0.30), 0.14, (0.30, 0.40, 0.35), 3),
    Species("jasmine", "white", 6, 0.8, 0.7, (0.98, 0.97, 0.88), (1.0, 1.0, 1.0), (0.95, 0.88, 0.40), 0.11, (0.10, 0.22, 0.28)),
)  # fmt: skip


class SyntheticFlowers(ImageSource):
    """``count`` images of ``side`` px that cycle through the species; image ``i`` is a function of (seed, i)."""

    def __init__(self, side: int, *, count: int = 4096, seed: int = 0) -> None:
        self.side, self.count, self.seed = side, count, seed
        self.name = SYNTHETIC_FLOWERS
        self.fingerprint = f"{SYNTHETIC_FLOWERS} {SYNTHETIC_VERSION} {side} {count} {seed}"
        self.class_names = [species.name for species in SPECIES]

    def __len__(self) -> int:
        return self.count

    @override
    def load(self, index: int) -> tuple[Image.Image, int]:
        label = index % len(SPECIES)
        picture = draw_flower(SPECIES[label], self.side, np.random.default_rng((self.seed, index)))
        return Image.fromarray(picture), label

    @override
    def read_table(self) -> dict[str, list[Any]]:
        species = [SPECIES[index % len(SPECIES)] for index in range(self.count)]
        places = [_place(np.random.default_rng((self.seed, index))) for index in range(self.count)]
        return {
            # Each epoch draws one of the two captions.
            "text": [[f"a {s.colour} {s.name}", f"a {s.colour} flower with {s.petals} petals"] for s in species],
            "species": [each.name for each in species],
            "petals": [each.petals for each in species],
            "hue": [round(360 * rgb_to_hsv(*each.petal)[0], 1) for each in species],
            "size": [round(radius / 2, 4) for _centre, radius in places],
        }


def draw_flower(species: Species, side: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw one flower ``[side, side, 3]``; ``rng`` determines its position, size, rotation, tilt and shades."""
    x, y = _flower_coordinates(side, rng)
    pixel = np.hypot(*np.gradient(x)).max()  # one pixel in units of the flower's radius
    radius, angle = np.hypot(x, y), np.arctan2(y, x)

    canvas = _background(species.background, side, rng)
    shade = rng.normal(0, 0.05, 3).astype(np.float32)
    for row in range(species.rows):
        size = 1 - 0.27 * row
        phase = angle * species.petals / 2 + row * np.pi / 2
        outline = size * (1 - species.notch * (1 - np.abs(np.cos(phase)) ** species.point))
        along = np.clip(radius / size, 0, 1)[..., None]
        colour = np.asarray(species.petal) * (1 - along) + np.asarray(species.tip) * along
        vein = 1 - 0.22 * np.abs(np.sin(phase))[..., None] - 0.10 * row
        canvas = _paint(canvas, colour * vein + shade, (outline - radius) / pixel)
    florets = 1 + 0.15 * np.sin(40 * radius) * np.sin(angle * 12)
    disc = np.asarray(species.disc) * florets[..., None]
    canvas = _paint(canvas, disc, (species.disc_radius - radius) / pixel)
    return (np.clip(canvas, 0, 1) * 255).round().astype(np.uint8)


def _flower_coordinates(side: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Coordinates of each pixel in a flower of radius 1 that is shifted, rotated and tilted away from the viewer."""
    grid = (np.arange(side, dtype=np.float32) + 0.5) / side * 2 - 1
    y, x = np.meshgrid(grid, grid, indexing="ij")
    centre, radius = _place(rng)
    x, y = (x - centre[0]) / radius, (y - centre[1]) / radius
    tilt, turn = rng.uniform(0, 2 * np.pi), rng.uniform(0, 2 * np.pi)
    along, across = _rotated(x, y, tilt)
    return _rotated(along / rng.uniform(0.75, 1.0), across, turn)


def _place(rng: np.random.Generator) -> tuple[Array, float]:
    """Draw the centre and the radius of a flower, the first draws of its picture, in halves of the side."""
    return rng.uniform(-0.15, 0.15, 2), rng.uniform(0.6, 0.88)


def _rotated(x: Array, y: Array, angle: float) -> tuple[Array, Array]:
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return cos * x - sin * y, sin * x + cos * y


def _background(colour: Colour, side: int, rng: np.random.Generator) -> Array:
    """Draw a gradient from the colour to a darker one, in a random direction, with soft out-of-focus spots."""
    grid = np.linspace(-1, 1, side, dtype=np.float32)
    y, x = np.meshgrid(grid, grid, indexing="ij")
    light = 1 + 0.25 * _rotated(x, y, rng.uniform(0, 2 * np.pi))[0]
    for _ in range(4):
        place, width = rng.uniform(-1, 1, 2), rng.uniform(0.2, 0.5)
        distance = ((x - place[0]) ** 2 + (y - place[1]) ** 2) / width**2
        light = light + rng.uniform(-0.2, 0.2) * np.exp(-distance)
    return np.asarray(colour, dtype=np.float32) * light[..., None]


def _paint(canvas: Array, colour: Array, depth: Array) -> Array:
    """Paint a shape over the canvas; ``depth`` is the depth of each pixel's centre inside the shape [px]."""
    coverage = np.clip(depth + 0.5, 0, 1)[..., None]
    return (canvas * (1 - coverage) + colour * coverage).astype(np.float32)
