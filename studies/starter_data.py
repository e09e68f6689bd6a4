"""The pictures of a starter, reduced and with their licences, in one Parquet file for each source.

    python -m studies.starter_data --state runs/starter --packages FOLDER --emoji FOLDER

A file that is there is not written again. The files hold all that a training needs, so that it can run on a machine
without the packages.
"""

import csv
import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from PIL import Image

from studies.starter_sources import Kind, Picture, open_sources

Image.MAX_IMAGE_PIXELS = None
MIN_LONG, MIN_SHORT = 96, 128
"""Smallest long side of pictures with transparent parts, and smallest short side of other pictures [px]."""
HELD_OUT = 16
"""One picture in so many is for figures only."""
QUALITY = 85
"""Quality of the reduced pictures, which are stored as WebP."""


@dataclass(frozen=True)
class Plan:
    """The kind of the pictures of a source, and the size at which they are stored."""

    kind: Kind
    side: int = 512
    """Short side of the stored pictures [px], of pictures with transparent parts the long side."""


PLANS = {
    "openclipart": Plan("drawing", 256),
    "emoji": Plan("emoji", 256),
    "drawn": Plan("drawing", 256),
    "plasma": Plan("drawing", 1024),
    "gnome": Plan("drawing", 1024),
    "mate": Plan("drawing", 1024),
    "ukui": Plan("drawing", 1024),
    "land": Plan("photograph"),
    "things": Plan("photograph"),
    "words": Plan("drawing", 256),
    "sprites": Plan("render", 256),
    "terrain": Plan("photograph"),
    "skies": Plan("photograph"),
    "plants": Plan("photograph", 256),
    "walls": Plan("photograph"),
    "tracks": Plan("photograph"),
    "budgie": Plan("photograph", 1024),
    "kylin": Plan("photograph", 1024),
    "samples": Plan("photograph"),
    "renders": Plan("render", 128),
}


@dataclass(frozen=True)
class Flags:
    """Where the pictures are."""

    packages: Path = Path("packages")
    """Folder of the unpacked Debian packages."""
    emoji: Path = Path("emoji")
    """Folder of the dataset of emoji."""
    state: Path = Path("runs/starter")
    """Folder of ``sources`` and ``renders``."""
    only: tuple[str, ...] = tuple(PLANS)
    """Sources to store."""
    table: Path | None = None
    """File for a table of the sources with their authors and licences."""


def is_held_out(name: str) -> bool:
    """Return whether a picture is for figures only."""
    return zlib.crc32(name.encode()) % HELD_OUT == 0


def reduced(picture: Picture, side: int) -> bytes | None:
    """Return a picture as WebP, reduced to at most ``side``; None if it is too small."""
    image = picture.open()
    length, least = (max(image.size), MIN_LONG) if image.mode == "RGBA" else (min(image.size), MIN_SHORT)
    if length < least:
        return None
    scale = side / length
    if scale < 1:
        sides = [max(1, round(scale * each)) for each in image.size]
        image = image.resize((sides[0], sides[1]), Image.Resampling.LANCZOS, reducing_gap=3)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=QUALITY)
    return file.getvalue()


def store(folder: Path, name: str, list_pictures: Callable[[], list[Picture]]) -> None:
    """Write the file of a source, unless it is there."""
    file = folder / f"{name}.parquet"
    if file.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    pictures = list_pictures()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        images = list(pool.map(partial(reduced, side=PLANS[name].side), pictures, chunksize=16))
    pairs = [(picture, image) for picture, image in zip(pictures, images, strict=True) if image is not None]
    columns = {each: [getattr(picture, each) for picture, _ in pairs] for each in ("name", "authors", "licence")}
    table = pa.table({**columns, "image": [image for _, image in pairs]})
    pq.write_table(table, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)
    print(f"{name}: {len(pairs)} pictures, {file.stat().st_size / 1e6:.1f} MB", flush=True)


def terms_of(pictures: list[Picture]) -> list[dict[str, Any]]:
    """Return the licences and authors of pictures, with the number of pictures of each."""
    terms = Counter((each.licence, each.authors) for each in pictures)
    return [
        {"licence": licence, "authors": authors, "pictures": number} for (licence, authors), number in terms.items()
    ]


def write_table(sources: Mapping[str, Callable[[], list[Picture]]], file: Path) -> None:
    """Write a table of the sources, with the authors and the licences of their pictures."""
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, ["source", "kind", "licence", "pictures", "authors"], lineterminator="\n")
        table.writeheader()
        for name, list_pictures in sources.items():
            for row in terms_of(list_pictures()):
                table.writerow({"source": name, "kind": PLANS[name].kind, **row})


def main() -> None:
    """Store the sources in their order."""
    flags = tyro.cli(Flags, prog="python -m studies.starter_data", description=__doc__, use_underscores=True)
    sources = open_sources(flags.packages, flags.emoji, flags.state / "renders")
    for name in flags.only:
        store(flags.state / "sources", name, sources[name])
    if flags.table is not None:
        write_table({name: sources[name] for name in PLANS if name != "renders"}, flags.table)


if __name__ == "__main__":
    main()
