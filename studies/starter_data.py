"""Crops of the pictures of a starter, their latents, and the table of their sources.

    python -m studies.starter_data --state runs/starter --packages FOLDER --emoji FOLDER

Each source becomes ``data/NAME.npy``, crops of 256 px (of 128 px for renders), and ``data/NAME-latents.npy``, the
latents of views of 128 px of these crops. ``data/NAME.json`` is written last, and a source that has it is not built
again. Crops of one picture in sixteen are for figures only; they are the last rows of each file.
"""

import csv
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.lib.format import open_memmap
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image

from rectified_flow import Small
from studies.autoencoder_data import FILTERS, HELD_OUT, colour, texture
from studies.starter_sources import Kind, Picture, open_sources

Image.MAX_IMAGE_PIXELS = None
SIDE, VIEW = 256, 128
"""Sides of the crops and of the views whose latents are stored [px]."""
LATENTS = (8, VIEW // 8, VIEW // 8)
MIN_SIDE = 96
"""Smaller pictures are left out [px]."""
WHOLE = 0.5
"""Share of views that show the whole crop."""
ENCODED_AT_ONCE = 64
Crop = NDArray[np.uint8]


@dataclass(frozen=True)
class Plan:
    """How the crops of a source are made."""

    kind: Kind
    crops: int
    """Crops of each picture."""
    views: int
    """Views of each crop."""
    over_photographs: float = 0.0
    """Share of the transparent pictures that are composed over crops of ``land``."""
    side: int = SIDE


PLANS = {
    "openclipart": Plan("drawing", 2, 2),
    "emoji": Plan("emoji", 1, 8),
    "drawn": Plan("drawing", 1, 3),
    "plasma": Plan("drawing", 80, 2),
    "gnome": Plan("drawing", 60, 2),
    "mate": Plan("drawing", 60, 2),
    "land": Plan("photograph", 24, 6),
    "things": Plan("photograph", 8, 6),
    "words": Plan("drawing", 4, 3, over_photographs=0.3),
    "ukui": Plan("drawing", 60, 2),
    "composed": Plan("drawing", 1, 2, over_photographs=0.7),
    "sprites": Plan("render", 4, 2, over_photographs=0.5),
    "renders": Plan("render", 2, 2, over_photographs=0.5, side=VIEW),
}
"""The sources. ``composed`` has the drawings of ``openclipart``, mostly over photographs."""


@dataclass(frozen=True)
class Flags:
    """Where the pictures are."""

    packages: Path
    """Folder of the unpacked Debian packages."""
    emoji: Path
    """Folder of the dataset of emoji."""
    state: Path = Path("runs/starter")
    """Folder of ``data`` and ``renders``."""
    only: tuple[str, ...] = tuple(name for name in PLANS if name != "renders")
    """Sources to build."""
    table: Path | None = None
    """File for the table of the sources that are built, such as studies/starter_sources.csv."""


def cut(image: Image.Image, side: int, rng: Generator) -> Image.Image:
    """Return a square of ``side`` px at a scale between the native one and the whole picture."""
    most = min(image.size)
    length = min(most, math.exp(rng.uniform(math.log(min(side, most)), math.log(most))))  # without a rounding error
    x, y = (rng.uniform(0, each - length) for each in image.size)
    box = (x, y, x + length, y + length)
    return image.resize((side, side), FILTERS[rng.integers(3)], box, reducing_gap=2)


def compose(image: Image.Image, ground: Image.Image, rng: Generator) -> Image.Image:
    """Return a picture with transparent parts over a ground, whole or in part."""
    side = ground.width
    scale = rng.uniform(1, 1.3) if rng.random() < 0.7 else rng.uniform(0.4, 1)
    length = max(side // 2, round(scale * max(image.size)))
    x, y = (round(rng.uniform(min(0, each - length), max(0, each - length))) for each in image.size)
    part = image.crop((x, y, x + length, y + length)).resize((side, side), FILTERS[rng.integers(3)])
    ground.paste(part, (0, 0), part)
    return ground


def draw_ground(side: int, rng: Generator) -> Image.Image:
    """Return white, a colour or a texture."""
    kind = rng.random()
    return (
        texture(rng, side) if kind < 0.25 else Image.new("RGB", (side, side), "white" if kind < 0.75 else colour(rng))
    )


def is_held_out(picture: Picture) -> bool:
    """Return whether a picture is for figures only."""
    return zlib.crc32(picture.name.encode()) % HELD_OUT == 0


def crops_of(picture: Picture, plan: Plan, grounds: NDArray[np.uint8] | None) -> Iterator[Crop]:
    """Return the crops of a picture; none of one that is too small."""
    rng = default_rng(zlib.crc32(f"{picture.name} {plan.over_photographs}".encode()))
    image = picture.open()
    if max(image.size) < MIN_SIDE:
        return
    for _ in range(plan.crops):
        if image.mode == "RGB":
            yield np.asarray(image if image.size == (plan.side, plan.side) else cut(image, plan.side, rng))
            continue
        ground = draw_ground(plan.side, rng)
        if grounds is not None and rng.random() < plan.over_photographs:
            ground = Image.fromarray(grounds[rng.integers(len(grounds))]).resize((plan.side, plan.side))
        yield np.asarray(compose(image, ground, rng))


def views_of(crop: Crop, count: int, rng: Generator) -> Iterator[Crop]:
    """Return views of a crop, whole or in part, half of them mirrored."""
    image = Image.fromarray(crop)
    for _ in range(count):
        length = image.width if rng.random() < WHOLE else rng.uniform(min(VIEW, image.width), image.width)
        x, y = rng.uniform(0, image.width - length, 2)
        if length == image.width == VIEW:
            view = crop
        else:
            view = np.asarray(image.resize((VIEW, VIEW), FILTERS[rng.integers(3)], (x, y, x + length, y + length)))
        yield view[:, :: rng.choice((1, -1))]


def build_crops(folder: Path, name: str, pictures: list[Picture]) -> int:
    """Write the crops of a source, those for figures last; return the number of crops for training."""
    plan = PLANS[name]
    grounds = None
    if plan.over_photographs:
        count = json.loads((folder / "land.json").read_text())["training"]
        grounds = np.load(folder / "land.npy", mmap_mode="r")[:count]
    new = folder / f"{name}.new.npy"
    crops = open_memmap(new, "w+", np.uint8, (plan.crops * len(pictures), plan.side, plan.side, 3))
    row = training = 0
    for held_out in (False, True):
        for picture in pictures:
            if is_held_out(picture) == held_out:
                for crop in crops_of(picture, plan, grounds):
                    crops[row] = crop
                    row += 1
        training = training if held_out else row
    crops.flush()
    shorten(new, row)
    os.replace(new, folder / f"{name}.npy")
    return training


def shorten(file: Path, rows: int) -> None:
    """Cut the file of an array off after some rows."""
    array = np.load(file, mmap_mode="r")
    if rows < len(array):
        shorter = open_memmap(file.with_suffix(".short"), "w+", array.dtype, (rows, *array.shape[1:]))
        shorter[:] = array[:rows]
        os.replace(file.with_suffix(".short"), file)


@torch.no_grad()
def build_latents(folder: Path, name: str) -> None:
    """Write the latents of the views of all crops of a source, float16 ``[crops * views, 8, 16, 16]``."""
    crops, plan, autoencoder = np.load(folder / f"{name}.npy", mmap_mode="r"), PLANS[name], Small()
    new = folder / f"{name}-latents.new.npy"
    latents = open_memmap(new, "w+", np.float16, (len(crops) * plan.views, *LATENTS))
    rng = default_rng(zlib.crc32(name.encode()))
    step = max(1, ENCODED_AT_ONCE // plan.views)
    for first in range(0, len(crops), step):
        views = np.stack([view for crop in crops[first : first + step] for view in views_of(crop, plan.views, rng)])
        encoded, _ = autoencoder.encode(torch.from_numpy(views).permute(0, 3, 1, 2).float() / 127.5 - 1)
        latents[first * plan.views : first * plan.views + len(views)] = encoded.numpy()
    latents.flush()
    os.replace(new, folder / f"{name}-latents.npy")


def build(folder: Path, name: str, list_pictures: Callable[[], list[Picture]]) -> None:
    """Build a source, unless it is there."""
    if (folder / f"{name}.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    pictures = list_pictures()
    training = build_crops(folder, name, pictures)
    build_latents(folder, name)
    plan = PLANS[name]
    terms = Counter((each.licence, each.authors) for each in pictures)
    rows = [
        {"licence": licence, "authors": authors, "pictures": number} for (licence, authors), number in terms.items()
    ]
    about: dict[str, Any] = {"kind": plan.kind, "training": training, "views": plan.views, "terms": rows}
    (folder / f"{name}.json.new").write_text(json.dumps(about, indent=1))
    os.replace(folder / f"{name}.json.new", folder / f"{name}.json")
    print(name, len(pictures), "pictures,", training, "crops for training", flush=True)


def write_table(folder: Path, file: Path) -> None:
    """Write a table of all sources, with the authors and the licence of the pictures."""
    with file.open("w", newline="") as opened:
        table = csv.writer(opened)
        table.writerow(["source", "kind", "licence", "pictures", "authors"])
        for name in PLANS:
            if (folder / f"{name}.json").exists():
                about = json.loads((folder / f"{name}.json").read_text())
                for row in about["terms"]:
                    table.writerow([name, about["kind"], row["licence"], row["pictures"], row["authors"]])


def main() -> None:
    """Build the sources in their order."""
    flags = tyro.cli(Flags, prog="python -m studies.starter_data", description=__doc__, use_underscores=True)
    torch.set_num_threads(1)
    sources = dict(open_sources(flags.packages, flags.emoji, flags.state / "renders"))
    sources["composed"] = sources["openclipart"]
    for name in flags.only:
        build(flags.state / "data", name, sources[name])
    if flags.table:
        write_table(flags.state / "data", flags.table)


if __name__ == "__main__":
    main()
