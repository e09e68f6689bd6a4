"""Write a store that takes long to make, from one process or several; writing resumes after a kill."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.store import (
    FEATURES,
    INFO_FILE,
    LABELS_FILE,
    NOISE_FILE,
    describe_files,
    dtype_of,
    find_damage,
    hash_contents,
    row_size,
)
from rectified_flow.errors import DamageError, require
from rectified_flow.system.files import flush_folder, read_document, remove, write_document
from rectified_flow.system.machine import require_disk

RECIPE_FILE, PROGRESS_FILE = "recipe.json", "progress.json"
R = TypeVar("R")


@dataclass(frozen=True)
class Progress:
    """``progress.json``."""

    done: Annotated[int, Field(ge=0)]
    """Rows that are written."""
    sha256: str = ""
    """Of this document; earlier versions did not record it."""


class StoreWriter:
    """Writes the rows of a store, in any order.

    Args:
        path: the store's folder, which gets this name when it is complete.
        length: number of rows.
        rows: shape of a row by file, ``NAME.DTYPE``.
        called: what the rows are, in the plural.
    """

    def __init__(self, path: Path, length: int, rows: Mapping[str, Sequence[int]], called: str) -> None:
        self.path, self.length, self.rows, self.called = path, length, dict(rows), called
        self.stage = path.with_name(f"{path.name}.drawing")

    @staticmethod
    def recipe_of(path: Path, schema: type[R]) -> R | None:
        """The recipe of the store at ``path``, complete or not; None if the store has not been started.

        Raises:
            UsageError: if it cannot be read, or does not fit the ``schema``.
        """
        for folder in StoreWriter.folders_of(path):
            if (folder / RECIPE_FILE).exists():
                return read_document(folder / RECIPE_FILE, schema)
        return None

    @staticmethod
    def folders_of(path: Path) -> list[Path]:
        """The folders of the store at ``path`` that are there: the complete one, and that in writing."""
        return [folder for folder in (path, path.with_name(f"{path.name}.drawing")) if folder.exists()]

    @property
    def is_whole(self) -> bool:
        """Whether the store exists and is undamaged."""
        return self.path.exists() and find_damage(self.path) is None

    def begin(self, recipe: Mapping[str, Any]) -> int:
        """Create the files unless they exist, and return the number of rows written so far. Call in one process only.

        Raises:
            OSError: if the files cannot be created.
            UsageError: if the disk has no room for them, or something that is no store is in their place.
        """
        if self.path.exists():
            self._remove_damaged()
        progress = self.stage / PROGRESS_FILE
        if progress.exists():
            try:
                return min(read_document(progress, Progress).done, self.length)
            except DamageError as error:
                tqdm.write(f"warning: {error}; starting again")
        sizes = {name: row_size(name, shape) * self.length for name, shape in self.rows.items()}
        what = f"{self.length} {self.called}"
        require_disk(sum(sizes.values()), self.path.parent, what, "make room, or take fewer")
        self.stage.mkdir(parents=True, exist_ok=True)
        for name, size in sizes.items():
            with (self.stage / name).open("wb") as file:
                file.truncate(size)
        write_document(self.stage / RECIPE_FILE, recipe)
        self.reached(0)
        return 0

    def _remove_damaged(self) -> None:
        names = {*self.rows, NOISE_FILE, LABELS_FILE, INFO_FILE, RECIPE_FILE, PROGRESS_FILE}
        entries = list(self.path.iterdir()) if self.path.is_dir() else [self.path]
        strange = [entry for entry in entries if entry.name not in names and not entry.name.startswith((FEATURES, "."))]
        require(
            not strange,
            f"{self.path} is in the way of the {self.called}, and holds {strange[0].name if strange else ''}: move it "
            "away, or name a folder that does not exist yet",
        )
        if entries:
            tqdm.write(f"warning: {self.path} is damaged; the {self.called} are made again")
        remove(self.path)

    def write(self, first: int, values: Mapping[str, Tensor]) -> None:
        """Write consecutive rows, starting at number ``first``.

        Args:
            first: number of the first row.
            values: ``[b, ...]`` by file.

        Raises:
            OSError: if the disk is full.
        """
        for name, rows in values.items():
            with (self.stage / name).open("r+b") as file:
                file.seek(first * row_size(name, self.rows[name]))
                file.write(rows.cpu().numpy().astype(dtype_of(name)).tobytes())
                file.flush()
                os.fsync(file.fileno())

    def reached(self, done: int) -> None:
        """Record that the first ``done`` rows are written. Call in one process only."""
        write_document(self.stage / PROGRESS_FILE, {"done": done})

    def finish(self, labels: np.ndarray[Any, np.dtype[np.int64]], **info: Any) -> None:
        """Give the store its final name, once all rows are written. Call in one process only.

        Args:
            labels: int64 ``[n]``, -1 without labels.
            info: further fields of :class:`rectified_flow.data.store.StoreInfo`.
        """
        np.save(self.stage / LABELS_FILE, labels)
        files = (*self.rows, LABELS_FILE)
        document = {
            "content": hash_contents(self.stage, *files),
            "length": self.length,
            "rows": {name: list(shape) for name, shape in self.rows.items()},
            "files": describe_files(self.stage, *files),
        }
        write_document(self.stage / INFO_FILE, document | info)
        flush_folder(self.stage)
        self.stage.rename(self.path)
        (self.path / PROGRESS_FILE).unlink(missing_ok=True)
