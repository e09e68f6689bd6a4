"""Pairs of noise and the image that a flow generated from it, in memory maps: an image store with ``noise.float16``."""

import json
import os
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectified_flow.data.image_store import (
    IMAGES_FILE,
    INFO_FILE,
    LABELS_FILE,
    ImageDataset,
    describe_files,
    find_damage,
    hash_contents,
)
from rectified_flow.files import flush_folder, replace_file
from rectified_flow.machine import require_disk

NOISE_FILE, RECIPE_FILE, PROGRESS_FILE = "noise.float16", "recipe.json", "progress.json"


class PairDataset(ImageDataset):
    """The pairs of a store: the items of an :class:`ImageDataset`, each with ``noise``, float16 ``[3, s, s]``.

    Args:
        path: the store's folder.
    """

    @cached_property
    def noise(self) -> np.ndarray[Any, np.dtype[np.float16]]:
        """All noise, a read-only memory map ``[n, 3, s, s]``."""
        return np.memmap(self.path / NOISE_FILE, np.float16, "r", shape=self.images.shape)

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {**super().read_batch(indices), "noise": torch.from_numpy(self.noise[list(indices)])}


class PairWriter:
    """Writes a store of pairs, from one process or several. Writing resumes after a kill.

    Args:
        path: the store's folder, which gets this name when it is complete.
        length: number of pairs.
        image_size: side of the images [px].
    """

    def __init__(self, path: Path, length: int, image_size: int) -> None:
        self.path, self.length, self.image_size = path, length, image_size
        self.stage = path.with_name(f"{path.name}.drawing")
        self._row = 3 * image_size * image_size

    @staticmethod
    def recipe_of(path: Path) -> dict[str, Any] | None:
        """The recipe of the store at ``path``, complete or not; None if the store has not been started."""
        for folder in (path, path.with_name(f"{path.name}.drawing")):
            if (folder / RECIPE_FILE).exists():
                return dict(json.loads((folder / RECIPE_FILE).read_text()))
        return None

    @property
    def is_whole(self) -> bool:
        """Whether the store exists and is undamaged."""
        return self.path.exists() and find_damage(self.path) is None

    def begin(self, recipe: dict[str, Any]) -> int:
        """Create the files unless they exist, and return the number of pairs written so far. Call in one process only.

        Raises:
            OSError: if the files cannot be created.
            UsageError: if the disk has no room for them.
        """
        if self.path.exists():
            shutil.rmtree(self.path)  # damaged
        progress = self.stage / PROGRESS_FILE
        if progress.exists():
            return int(json.loads(progress.read_text())["done"])
        needed = 3 * self._row * self.length
        require_disk(needed, self.path.parent, f"{self.length} pairs", "draw fewer, or make room")
        self.stage.mkdir(parents=True, exist_ok=True)
        for name, size in ((IMAGES_FILE, self._row), (NOISE_FILE, 2 * self._row)):
            with (self.stage / name).open("wb") as file:
                file.truncate(self.length * size)
        replace_file(self.stage / RECIPE_FILE, json.dumps(recipe, indent=1))
        self.reached(0)
        return 0

    def write(self, first: int, images: Tensor, noise: Tensor) -> None:
        """Write consecutive pairs, uint8 and floating point ``[b, 3, s, s]``, starting at number ``first``.

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
        """Record that the first ``done`` pairs are written. Call in one process only."""
        replace_file(self.stage / PROGRESS_FILE, json.dumps({"done": done}))

    def finish(self, labels: np.ndarray[Any, np.dtype[np.int64]], class_names: list[str], source: str) -> None:
        """Give the store its final name, once all pairs are written. Call in one process only.

        Args:
            labels: int64 ``[n]``, -1 without labels.
            class_names: class names by label; empty without labels.
            source: origin of the pairs, for display.
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
        (self.stage / INFO_FILE).write_text(json.dumps(info, indent=1))
        flush_folder(self.stage)
        self.stage.rename(self.path)
        (self.path / PROGRESS_FILE).unlink(missing_ok=True)
