"""Pictures that were dropped on the page: copied, or unpacked, into a folder of their own."""

import shutil
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path
from zipfile import ZipFile

from rectified_flow.errors import UsageError, first_line

PICTURES = "pictures"
"""Folder of dropped pictures, in the folder of the runs or of a run."""
ROOM = 2**30  # bytes of disk that stay free


def receive(place: Path, name: str, files: Sequence[Path]) -> Path:
    """Copy dropped files into a new folder, and return it. Nothing stays if one of them cannot be used.

    Args:
        place: the folder of the runs, or of a run.
        name: name of the new folder; a number is appended if a folder of this name exists.
        files: the files, which are unpacked if they are zips. They stay, since the page may send them again.
    """
    folder = unused(place / PICTURES / name)
    folder.mkdir(parents=True)
    try:
        for file in files:
            if file.suffix.lower() == ".zip":
                unpack(file, folder)
            else:
                shutil.copy(file, unused(folder / file.name))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def take_over(folder: Path, old: Path) -> None:
    """Move the files of an old folder into another one, at the same places, and remove the old folder."""
    for file in [each for each in old.rglob("*") if each.is_file()]:
        target = unused(folder / file.relative_to(old))
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)
    shutil.rmtree(old)


def unpack(file: Path, folder: Path) -> None:
    """Unpack a zip archive with its subfolders, which may be classes, beside the files that are in the folder.

    No file is written outside of the folder.

    Raises:
        UsageError: if the archive is broken, has a password, or does not fit.
    """
    try:
        with ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > shutil.disk_usage(folder).free - ROOM:
                raise OSError(f"its files need {size / 1e9:.1f} GB, more than is free")
            for member in archive.infolist():
                if not member.is_dir():
                    name = normpath(f"/{member.filename}").lstrip("/")
                    member.filename = str(unused(folder / name).relative_to(folder))
                    archive.extract(member, folder)
    except Exception as error:  # of many types, by what is damaged
        reason = first_line(error)
        raise UsageError(f"{file.name} cannot be unpacked ({reason}): make the zip again, or make room") from error


def unused(path: Path) -> Path:
    """Return a path that no file has, such as ``cat-2.png`` beside ``cat.png``."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
