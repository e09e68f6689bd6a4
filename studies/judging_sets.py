"""Write the sets of pictures on which the studies of 128 px are measured.

    apt-get download lomiri-wallpapers-16.04 lomiri-wallpapers-20.04 lxqt-themes palapeli-data opencv-doc \
        tuxpaint-stamps-default endless-sky-data && for each in *.deb; do dpkg -x $each packages; done
    python -m studies.judging_sets --packages packages --emoji FOLDER --output_dir sets
    export STUDIES_DATA=$PWD/sets

No weights of the package were trained on ``photographs`` and ``cut-outs``. The starter for latents was trained
on most of ``emoji`` and ``people``, and many of ``landscapes``. The same program writes the same files each time.
"""

import math
import random
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import datasets
import tyro
from PIL import Image, ImageStat

SIDE, COUNT, LARGEST = 128, 500, 1024
"""Side of the pictures [px], their number, and the largest side of a crop [px]."""
FLAT, TRIES = 12.0, 20
"""A crop whose grey values have a smaller standard deviation is drawn again, at most ``TRIES`` times."""
SMALLEST = 72
"""Least long side of a stamp [px]."""
COINS = re.compile("symbols/money/[a-z]")
PHOTOGRAPHS = {
    "backgrounds": "Bridge_by_Sander_Klootwijk.jpg Dragonfly_by_Bolly.jpg Picture_0B_by_freespace.jpg "
    "Picture_1A_by_freespace.jpg Wine_by_Jakkub_Mede.jpg aitzgorri_by_Aitzol_Berasategi.jpg free_by_Peter_Nerlich.jpg "
    "friends_by_Aitzol_Berasategi.jpg greentock_by_Peter_Nerlich.jpg life_by_Aitzol_Berasategi.jpg "
    "picosdeeuropa_by_Aitzol_Berasategi.jpg seeding_by_Clements_Engelhardt.jpg sunset_by_Aitzol_Berasategi.jpg "
    "Kleiber_by_Lukas_Baubkus.jpg",
    "lxqt/wallpapers": "Butterfly-Kenneth-Wimer.jpg after-the-rain.jpg appleflower.png beam.png butterfly.png drop.png "
    "flowers.png this-is-not-windows.jpg",
    "palapeli/collection": "castle-maintenon.jpg cincinnati-bridge.jpg citrus-fruits.jpg european-honey-bee.jpg "
    "panther-chameleon-female.jpg",
    "doc/opencv-doc/examples/data": "aloeL.jpg baboon.jpg building.jpg",
}
"""Photographs by their folder in ``usr/share``."""


@dataclass(frozen=True)
class Flags:
    """Where the pictures are, and where the sets are written."""

    packages: Path
    """Folder of the unpacked Debian packages."""
    emoji: Path
    """Folder of the dataset of emoji."""
    output_dir: Path
    """Folder for the sets."""


def write_crops(files: list[Path], folder: Path) -> None:
    """Write crops of log-uniform sides, the same number of each picture up to one."""
    chance = random.Random(0)
    for which, file in enumerate(files):
        image = Image.open(file).convert("RGB")
        for number in range(which, COUNT, len(files)):
            crop = draw_crop(image, chance)
            for _ in range(TRIES):
                if ImageStat.Stat(crop.convert("L")).stddev[0] >= FLAT:
                    break
                crop = draw_crop(image, chance)
            crop.save(folder / f"{number:04d}.png")


def draw_crop(image: Image.Image, chance: random.Random) -> Image.Image:
    """Return a random square part of a picture, reduced to 128 px."""
    side = round(math.exp(chance.uniform(math.log(SIDE), math.log(min(LARGEST, *image.size)))))
    x, y = chance.randint(0, image.width - side), chance.randint(0, image.height - side)
    return image.crop((x, y, x + side, y + side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def stamps(root: Path) -> list[Path]:
    """Return the stamps, without small ones, mirrored ones and letters. Coins are the last ones."""
    files = [each for each in root.rglob("*.png") if not each.stem.endswith(("_mirror", "_flip"))]
    names = sorted(each.relative_to(root).as_posix() for each in files)
    names = [name for name in names if not name.startswith("symbols/") or COINS.match(name)]
    names = [name for name in names if max(Image.open(root / name).size) >= SMALLEST]
    return [root / name for name in sorted(names, key=lambda name: (name.startswith("symbols/"), name))]


def write_stamps(files: list[Path], folder: Path) -> None:
    """Write stamps on white squares; large ones are reduced, and none are enlarged."""
    for number, file in enumerate(files[:COUNT]):
        stamp = Image.open(file).convert("RGBA")
        longest = max(*stamp.size, SIDE)
        square = Image.new("RGBA", (longest, longest), "white")
        square.alpha_composite(stamp, ((longest - stamp.width) // 2, (longest - stamp.height) // 2))
        square.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(folder / f"{number:04d}.png")


def write_bytes(pictures: Iterable[bytes], folder: Path) -> None:
    """Write pictures as they are."""
    for number, content in enumerate(pictures):
        (folder / f"{number:04d}.jpg").write_bytes(content)


def write_sets(flags: Flags) -> None:
    """Write all sets."""
    share = flags.packages / "usr/share"
    folders = {name: flags.output_dir / name for name in ("photographs", "cut-outs", "emoji", "people", "landscapes")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    write_crops(
        [share / folder / name for folder, names in PHOTOGRAPHS.items() for name in names.split()],
        folders["photographs"],
    )
    write_stamps(stamps(share / "tuxpaint/stamps"), folders["cut-outs"])
    rows = datasets.load_dataset(str(flags.emoji)).cast_column("image", datasets.Image(decode=False))
    write_bytes((row["bytes"] for row in rows["train"]["image"]), folders["emoji"])
    names = rows["train"].features["label"].names
    shown = {number for number, name in enumerate(names) if re.match("person(?!-symbol)|family", name)}
    every = datasets.concatenate_datasets([rows["train"], rows["test"]])
    write_bytes((row["image"]["bytes"] for row in every if row["label"] in shown), folders["people"])
    for file in sorted((share / "games/endless-sky/images/land").glob("*.jpg")):
        shutil.copy(file, folders["landscapes"])


def main() -> None:
    """Write the sets, and print their sizes."""
    flags = tyro.cli(Flags, prog="python -m studies.judging_sets", description=__doc__, use_underscores=True)
    write_sets(flags)
    for folder in sorted(flags.output_dir.iterdir()):
        print(f"{folder.name}: {len(list(folder.iterdir()))} pictures")


if __name__ == "__main__":
    main()
