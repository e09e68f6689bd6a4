"""Pictures that were dropped on the page: copied, or unpacked, into a folder of their own."""

import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import writing

PICTURES = Path("pictures")
"""Folder of dropped pictures, in the folder of the runs."""
MOST_FILES = 500_000
ROOM = 2**30  # bytes of disk that stay free


def free_folder(runs: Path, name: str) -> Path:
    """Make and return a new folder for dropped pictures."""
    place = runs / PICTURES
    with writing(place, UsageError):
        place.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            folder = place / (name if number == 1 else f"{name}-{number}")
            if not folder.exists():
                folder.mkdir()
                return folder
    raise UsageError(f"{place} holds too many folders called {name}: choose another name")


def receive(runs: Path, name: str, files: Sequence[Path]) -> Path:
    """Put dropped files into a new folder, and return it. Nothing stays if one of them cannot be used."""
    folder = free_folder(runs, name)
    try:
        for file in files:
            if file.suffix.lower() == ".zip":
                unpack(file, folder)
                file.unlink()  # it would use as much of the disk as its pictures
            else:
                shutil.move(file, unused(folder / file.name))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def unpack(file: Path, folder: Path) -> None:
    """Unpack the files of a zip archive below a folder, with the subfolders, which may be classes.

    Raises:
        UsageError: if the archive is broken, has a password, names files outside of the folder, or does not fit.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = [each for each in archive.infolist() if not each.is_dir()]
            check_members(file.name, members, shutil.disk_usage(folder).free)
            for member in members:
                archive.extract(member, folder)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError, ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{file.name} cannot be unpacked ({first_line(error)}): make the zip again, or make room"
        ) from error


def check_members(name: str, members: Sequence[zipfile.ZipInfo], free: int) -> None:
    """Raise a UsageError if an archive names files outside of its folder, or does not fit on the disk."""
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
            raise UsageError(f"{name} names a file outside of its folder: make the zip again")
    size = sum(member.file_size for member in members)
    if len(members) > MOST_FILES or size > free - ROOM:
        raise UsageError(f"{name} unpacks to {len(members):,} files of {size / 1e9:.1f} GB, too many for this disk")


def unused(path: Path) -> Path:
    """Return a path that no file has, such as ``cat-2.png`` beside ``cat.png``."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
