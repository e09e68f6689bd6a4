"""A folder of pictures, with a subfolder per class or none."""

import os
from hashlib import blake2b
from pathlib import Path

from PIL import Image

from rectified_flow.errors import UsageError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})


class ImageFolder:
    """Every picture below ``path``; the first subfolder's name is its class if all pictures lie in subfolders.

    Raises:
        UsageError: if there is no such folder, or no picture in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.files = find_images(path)
        if not self.files:
            kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
            raise UsageError(f"--dataset_path {path} holds no images ({kinds}) and no datasets files")
        self.fingerprint = files_fingerprint(path, self.files)
        parts = [file.relative_to(path).parts for file in self.files]
        labelled = all(len(part) > 1 for part in parts)
        self.class_names = sorted({part[0] for part in parts}) if labelled else []
        number = {name: label for label, name in enumerate(self.class_names)}
        self._labels = [number.get(part[0], -1) for part in parts]

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.files[index]), self._labels[index]

    def describe(self, index: int) -> str:
        return str(self.files[index])


def find_images(folder: Path) -> list[Path]:
    """All picture files below ``folder``, sorted, hidden ones left out.

    Raises:
        UsageError: if ``folder`` is not a folder.
    """
    if not folder.is_dir():
        raise UsageError(f"--dataset_path {folder} is not a folder")
    return [file for file in find_files(folder) if file.suffix.lower() in IMAGE_SUFFIXES]


def find_files(folder: Path) -> list[Path]:
    """All files below ``folder``, sorted, hidden files and folders left out."""
    files = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def files_fingerprint(folder: Path, files: list[Path]) -> str:
    """A hash of the files' names below ``folder``, sizes and times of change."""
    digest = blake2b(digest_size=16)
    for file in files:
        status = file.stat() if file.exists() else file.lstat()  # a link to nowhere is a broken image
        digest.update(f"{file.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
