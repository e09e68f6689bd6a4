"""Folders of files, and of images, with or without a subfolder per class."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

from PIL import Image
from tqdm.auto import tqdm

from rectified_flow.data.metadata import METADATA_FILES, Table, read_metadata
from rectified_flow.errors import UsageError
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import open_picture

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
OTHER_SUFFIXES = frozenset({".heic", ".heif", ".avif", ".gif", ".jfif", ".jxl", ".psd", ".svg", ".dng", ".cr2", ".nef"})
"""Suffixes of images that are not read, and are counted for a note."""


class FileFolder:
    """All files of a kind below ``path``. If every file is in a subfolder, its class is the name of the topmost one.

    Attributes:
        notes: lines on files that are not read, and on files without a class.

    Args:
        path: the folder.
        skip_unreadable: skip subfolders that cannot be read, instead of raising.

    Raises:
        UsageError: if the folder does not exist, cannot be read or contains no such files.
    """

    suffixes: ClassVar[frozenset[str]]
    """Suffixes of the files to read, in lower case."""
    other_suffixes: ClassVar[frozenset[str]]
    """Suffixes of files that are not read, and are counted for a note."""
    kind: ClassVar[str]
    """Name of the files in the plural, in the error about a folder without any."""
    noun: ClassVar[str]
    """Name of the files in the plural, in notes."""

    def __init__(self, path: Path, *, skip_unreadable: bool = False) -> None:
        self.name = printable(path.name)
        unreadable = list[OSError]()
        everything = find_files(path, unreadable.append if skip_unreadable else refuse_folder)
        if unreadable:
            first = printable(unreadable[0].filename)
            tqdm.write(f"skipped {len(unreadable)} unreadable folders; the first is {first}")
        self.files = [file for file in everything if file.suffix.lower() in self.suffixes]
        self._metadata = [file for file in everything if file.name in METADATA_FILES]
        kinds = Counter(file.suffix.lower() for file in everything).most_common()
        others = ", ".join(f"{count} {suffix[1:]}" for suffix, count in kinds if suffix in self.other_suffixes)
        self.notes = [f"ignored {others} files in {self.name}: unsupported formats"] if others else []
        if not self.files:
            read = ", ".join(sorted(suffix[1:] for suffix in self.suffixes))
            but = f", but {others} files of unsupported formats" if others else ""
            raise UsageError(f"--dataset_path {path} holds no {self.kind} ({read}) and no datasets files{but}")
        self.fingerprint = files_fingerprint(path, self.files)
        parts = [file.relative_to(path).parts for file in self.files]
        stray = [part[0] for part in parts if len(part) == 1]
        if 0 < len(stray) < len(parts):
            found = f"{len(stray)} {self.noun} are in no subfolder, such as {printable(stray[0])}"
            self.notes.append(f"no classes: {found}")
        classes = [] if stray else sorted({part[0] for part in parts})
        self.class_names = [printable(name) for name in classes]
        number = {name: label for label, name in enumerate(classes)}
        self._labels = [number.get(part[0], -1) for part in parts]

    def __len__(self) -> int:
        return len(self.files)

    def describe(self, index: int) -> str:
        """Return the path of a file."""
        return printable(self.files[index])

    def read_table(self) -> Table:
        """Return the columns of the metadata files among the files.

        Raises:
            UsageError: if a metadata file is damaged.
        """
        return read_metadata(self._metadata, self.files)


class ImageFolder(FileFolder):
    """All images below ``path``; see :class:`FileFolder` for their classes, and for arguments, notes and errors."""

    suffixes, other_suffixes, kind, noun = IMAGE_SUFFIXES, OTHER_SUFFIXES, "images", "pictures"

    def load(self, index: int) -> tuple[Image.Image, int]:
        """Return an undecoded image, and its label or -1."""
        return open_picture(self.files[index]), self._labels[index]


def find_images(folder: Path) -> list[Path]:
    """Return all image files below ``folder``, as :func:`find_files` finds them.

    Raises:
        UsageError: if a folder cannot be read.
    """
    return [file for file in find_files(folder) if is_image(file)]


def is_image(file: Path) -> bool:
    """Return whether a file has the name of an image that can be read."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def refuse_folder(error: OSError) -> None:
    """Raise a UsageError that names the unreadable folder."""
    name = printable(error.filename)
    remedy = "change its rights, or pass --skip_broken_images"
    raise UsageError(f"the folder {name} cannot be read ({error.strerror}): {remedy}") from error


def find_files(folder: Path, on_error: Callable[[OSError], object] = refuse_folder) -> list[Path]:
    """Return all files below ``folder``, sorted, without hidden files and folders.

    Links are followed, but each real folder is visited once: under its own name rather than that of a link.

    Args:
        folder: where to look.
        on_error: function called with the error of an unreadable folder; the folder is skipped unless it raises.
    """
    files, visited = list[Path](), set[tuple[int, int]]()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=on_error):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(
            (name for name in folders if not name.startswith(".")),
            key=lambda name: (os.path.islink(os.path.join(parent, name)), name),
        )
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def files_fingerprint(folder: Path, files: list[Path]) -> str:
    """Hash each file's path relative to ``folder``, its size and its modification time."""
    digest = blake2b(digest_size=16)
    for file in files:
        size, time = _size_and_time(file)
        digest.update(f"{file.relative_to(folder)}\0{size}\0{time}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _size_and_time(file: Path) -> tuple[int, int]:
    """Return size [bytes] and time [ns]; a link that leads nowhere, which is a broken image, has its own."""
    for stat in (os.stat, os.lstat):
        with suppress(OSError):
            status = stat(file)
            return status.st_size, status.st_mtime_ns
    return -1, -1  # the rights of the folder forbid reading the size and time
