"""Make the pictures of docs/gallery.md again: run the commands of its sections, and copy their results.

A section shows one picture, ``images/gallery/NAME.png`` or ``.webp``, and has one block of commands that write
``pictures/NAME.png`` or ``.webp``, or the folder ``pictures/NAME``, whose ``grid.png`` is shown. If the folder has
subfolders of samples instead, they become labelled rows of one picture. A training that has ended is not repeated.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from rectified_flow.errors import UsageError
from rectified_flow.system.pictures import encode_picture, open_picture, over_white, to_grid

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/gallery.md"
PICTURE = r"!\[[^\]]*\]\((images/gallery/[\w-]+\.(?:png|webp))\)"
SECTION = re.compile(rf"^## (.*?)$.*?{PICTURE}.*?```bash\n(.*?)```", re.DOTALL | re.MULTILINE)
COLUMNS, MIN_WIDTH = 12, 400
"""Largest number of samples in a row, and least width of a grid after it is enlarged [px]."""


@dataclass(frozen=True)
class Section:
    """A section of the gallery: its title, the picture that it shows, and the commands that make it."""

    title: str
    picture: Path
    commands: str


@dataclass(frozen=True)
class Config:
    """All flags of the program."""

    only: tuple[str, ...] = ()
    """Names of pictures to make, such as one-call; all if none are given."""
    data: Path = Path(os.environ.get("STUDIES_DATA", "data"))
    """Folder with the folders of pictures that the commands name."""
    output_dir: Path = Path("runs/gallery")
    """Folder in which the commands run."""


def sections_of(page: str) -> list[Section]:
    """Return the sections of a page that show a picture and have a block of commands."""
    return [Section(title, Path(picture), block) for title, picture, block in SECTION.findall(page)]


def run(commands: str, folder: Path) -> None:
    """Run commands of the page in a folder, with this Python and this checkout.

    Raises:
        UsageError: if a command fails.
    """
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    environment = {name: os.pathsep.join([str(path), os.environ.get(name, "")]) for name, path in paths.items()}
    if subprocess.run(["sh", "-exc", commands], cwd=folder, env=os.environ | environment, check=False).returncode:
        raise UsageError("the last command above failed")


def show(made: Path, picture: Path) -> None:
    """Write the picture of a section from the output of its commands.

    Args:
        made: file or folder without a suffix, such as ``pictures/one-call``.
        picture: the picture to write.
    """
    file = made.with_suffix(picture.suffix)
    if file.exists():
        picture.write_bytes(file.read_bytes())
    elif (made / "grid.png").exists():
        grid = over_white(open_picture(made / "grid.png"))
        factor = -(-MIN_WIDTH // grid.width)
        grid.resize((factor * grid.width, factor * grid.height), Image.Resampling.NEAREST).save(picture)
    else:
        rows = sorted(each for each in made.iterdir() if each.is_dir())
        files = [sorted(row.glob("0*.png"))[:COLUMNS] for row in rows]
        images = [pil_to_tensor(over_white(open_picture(file))) for row in files for file in row]
        names = [row.name.partition(" ")[2] for row in rows]  # without the number that orders them
        texts = [name for name, row in zip(names, files, strict=True) for _file in row]
        sheet = to_grid(torch.stack(images), len(files[0]), texts=texts)
        picture.write_bytes(encode_picture(sheet))


def main(config: Config) -> None:
    """Make the pictures of the gallery.

    Raises:
        UsageError: if a command fails, or there is no such picture.
    """
    chosen = {section.picture.stem: section for section in sections_of(PAGE.read_text())}
    if unknown := set(config.only) - chosen.keys():
        raise UsageError(f"--only {' '.join(sorted(unknown))} is not in {PAGE}: choose {', '.join(chosen)}")
    if not config.data.is_dir():
        raise UsageError(f"--data {config.data} is not a folder: pass the folder that holds the folders of pictures")
    config.output_dir.mkdir(parents=True, exist_ok=True)
    for source in (*config.data.iterdir(), ROOT / "examples"):
        link = config.output_dir / source.name
        if source.is_dir() and not link.exists():
            link.symlink_to(source.resolve())
    for name, section in chosen.items():
        if not config.only or name in config.only:
            print(f"# {section.title}", flush=True)
            run(section.commands, config.output_dir)
            picture = PAGE.parent / section.picture
            picture.parent.mkdir(exist_ok=True)
            show(config.output_dir / "pictures" / name, picture)
            print(f"picture  {picture}", flush=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except UsageError as error:
        sys.exit(f"gallery: error: {error}")
