"""What a flow generated, in memory maps: an image store with the noise of each image, or its path from the noise on.

``noise.float16`` is ``[n, points, 3, s, s]``: of a path all points but the image itself, of a pair the noise alone.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.image_store import (
    IMAGES_FILE,
    INFO_FILE,
    LABELS_FILE,
    ImageDataset,
    describe_files,
    find_damage,
    hash_contents,
)
from rectified_flow.documents import read_document, write_document
from rectified_flow.errors import DamageError
from rectified_flow.files import flush_folder, reading, remove
from rectified_flow.machine import require_disk

NOISE_FILE, RECIPE_FILE, PROGRESS_FILE = "noise.float16", "recipe.json", "progress.json"
R = TypeVar("R")


@dataclass(frozen=True)
class Progress:
    """``progress.json``."""

    done: Annotated[int, Field(ge=0)]
    """Rows that are written."""
    sha256: str = ""
    """Of this document; earlier versions did not record it."""


class PairDataset(ImageDataset):
    """The pairs or paths of a store: the items of an :class:`ImageDataset`, each with its ``noise``, float16
    ``[3, s, s]``, or its ``path``, float16 ``[points, 3, s, s]``.

    Args:
        path: the store's folder.
    """

    @cached_property
    def noise(self) -> np.ndarray[Any, np.dtype[np.float16]]:
        """All noise ``[n, 3, s, s]``, or all points of paths ``[n, points, 3, s, s]``: a read-only memory map."""
        with reading(self.path / NOISE_FILE):
            points = (self.path / NOISE_FILE).stat().st_size // (2 * self.images.size)
            length, *sides = self.images.shape
            shape = (length, *sides) if points == 1 else (length, points, *sides)
            return np.memmap(self.path / NOISE_FILE, np.float16, "r", shape=shape)

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        name = "noise" if self.noise.ndim == self.images.ndim else "path"
        return {**super().read_batch(indices), name: torch.from_numpy(self.noise[list(indices)])}


class PairWriter:
    """Writes a store of pairs or paths, from one process or several. Writing resumes after a kill.

    Args:
        path: the store's folder, which gets this name when it is complete.
        length: number of pairs or paths.
        image_size: side of the images [px].
        points: of each path beside its image; 1 for a pair.
    """

    def __init__(self, path: Path, length: int, image_size: int, points: int = 1) -> None:
        self.path, self.length, self.image_size, self.points = path, length, image_size, points
        self.stage = path.with_name(f"{path.name}.drawing")
        self._row = 3 * image_size * image_size

    @staticmethod
    def recipe_of(path: Path, schema: type[R]) -> R | None:
        """The recipe of the store at ``path``, complete or not; None if the store has not been started.

        Raises:
            UsageError: if it cannot be read, or does not fit the ``schema``.
        """
        for folder in (path, path.with_name(f"{path.name}.drawing")):
            if (folder / RECIPE_FILE).exists():
                return read_document(folder / RECIPE_FILE, schema)
        return None

    @property
    def is_whole(self) -> bool:
        """Whether the store exists and is undamaged."""
        return self.path.exists() and find_damage(self.path) is None

    def begin(self, recipe: Mapping[str, Any]) -> int:
        """Create the files unless they exist, and return the number of rows written so far. Call in one process only.

        Raises:
            OSError: if the files cannot be created.
            UsageError: if the disk has no room for them.
        """
        if self.path.exists():
            remove(self.path)  # damaged
        progress = self.stage / PROGRESS_FILE
        if progress.exists():
            try:
                return min(read_document(progress, Progress).done, self.length)
            except DamageError as error:
                tqdm.write(f"warning: {error}; drawing all again")
        noise = 2 * self.points * self._row
        what = "pairs" if self.points == 1 else "paths"
        require_disk(
            (self._row + noise) * self.length, self.path.parent, f"{self.length} {what}", "draw fewer, or make room"
        )
        self.stage.mkdir(parents=True, exist_ok=True)
        for name, size in ((IMAGES_FILE, self._row), (NOISE_FILE, noise)):
            with (self.stage / name).open("wb") as file:
                file.truncate(self.length * size)
        write_document(self.stage / RECIPE_FILE, recipe)
        self.reached(0)
        return 0

    def write(self, first: int, images: Tensor, noise: Tensor) -> None:
        """Write consecutive rows, starting at number ``first``.

        Args:
            first: number of the first row.
            images: uint8 ``[b, 3, s, s]``.
            noise: floating point ``[b, 3, s, s]``, or the points of paths ``[b, points, 3, s, s]``.

        Raises:
            OSError: if the disk is full.
        """
        for name, rows in ((IMAGES_FILE, images.numpy()), (NOISE_FILE, noise.half().numpy())):
            with (self.stage / name).open("r+b") as file:
                file.seek(first * rows[0].nbytes)
                file.write(rows.tobytes())
                file.flush()
                os.fsync(file.fileno())

    def reached(self, done: int) -> None:
        """Record that the first ``done`` rows are written. Call in one process only."""
        write_document(self.stage / PROGRESS_FILE, {"done": done})

    def finish(self, labels: np.ndarray[Any, np.dtype[np.int64]], class_names: list[str], source: str) -> None:
        """Give the store its final name, once all rows are written. Call in one process only.

        Args:
            labels: int64 ``[n]``, -1 without labels.
            class_names: class names by label; empty without labels.
            source: origin of the rows, for display.
        """
        np.save(self.stage / LABELS_FILE, labels)
        files = (IMAGES_FILE, NOISE_FILE, LABELS_FILE)
        info = {
            "content": hash_contents(self.stage, *files),
            "source": source,
            "length": self.length,
            "image_size": self.image_size,
            "class_names": class_names,
            "files": describe_files(self.stage, *files),
        }
        write_document(self.stage / INFO_FILE, info)
        flush_folder(self.stage)
        self.stage.rename(self.path)
        (self.path / PROGRESS_FILE).unlink(missing_ok=True)
