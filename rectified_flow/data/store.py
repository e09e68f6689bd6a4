"""A store: the rows of a dataset in memory maps that every process shares.

A store is a folder: a file ``NAME.DTYPE`` ``[n, ...]`` for each entry of its items, such as ``images.uint8``,
``labels.npy`` ``[n]`` (-1 without labels) and ``info.json``. ``info.json`` has a hash of the contents, and size and
time of each file, by which a later change is noticed.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow.condition import Condition, Labels
from rectified_flow.data.framing import Framing
from rectified_flow.errors import DamageError, NewerError
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.files import open_regular, read_document, reading, write_document
from rectified_flow.system.terminal import size_text

IMAGES_FILE, LATENTS_FILE, NOISE_FILE = "images.uint8", "latents.float16", "noise.float16"
LABELS_FILE, INFO_FILE = "labels.npy", "info.json"
FEATURES = "features-"
"""What the names of files begin with that have features of the rows."""
Positive = Annotated[int, Field(gt=0, lt=2**53)]


@dataclass(frozen=True)
class FileInfo:
    """What a file of a store was when it was written."""

    size: int
    """Bytes."""
    time: int
    """Of its last change [s]."""


@dataclass(frozen=True)
class LatentInfo:
    """What the latents of a store are of."""

    autoencoder: str
    """Its name, for display."""
    pictures: str
    """Fingerprint of the pictures that it encoded."""
    mean: list[float]
    """Of each channel, over all pictures."""
    std: list[float]
    """Standard deviation of each channel, likewise."""


@dataclass(frozen=True)
class OriginalInfo:
    """What the pictures of a store were before they were fitted."""

    width: list[Positive]
    """The least and the largest [px]."""
    height: list[Positive]
    """Likewise."""
    enlarged: int
    """Pictures that have fewer pixels than they are stored with."""
    duplicates: int
    """Pictures whose pixels in the store equal those of an earlier one."""


@dataclass(frozen=True)
class StoreInfo:
    """``info.json``."""

    content: str
    """Hash of the rows and labels."""
    source: str
    """Of the images, for display."""
    length: Positive
    image_size: Positive
    class_names: list[str] = field(default_factory=list)
    """By label; empty without labels."""
    skipped: list[str] = field(default_factory=list)
    """Broken images that were left out."""
    files: dict[str, FileInfo] = field(default_factory=dict)
    rows: dict[str, list[Positive]] = field(default_factory=dict)
    """Shape of a row of each file but the labels'; those of images with the default framing do not record it."""
    latents: LatentInfo | None = None
    framing: Framing | None = None
    """Of pictures; None for squares at the centre without transparency, the only one of earlier versions."""
    originals: OriginalInfo | None = None
    """Earlier versions did not record it."""
    sha256: str = ""
    """Of this document; earlier versions did not record it."""

    def __post_init__(self) -> None:
        for name, shape in self.shapes.items():
            file = self.files.get(name)
            if file is not None and file.size != row_size(name, shape) * self.length:
                raise ValueError(f"{file.size} bytes are not {self.length} rows of {' x '.join(map(str, shape))}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a row of each file but the labels'."""
        if self.rows:
            return {name: tuple(shape) for name, shape in self.rows.items()}
        images = (3, self.image_size, self.image_size)
        shapes: dict[str, tuple[int, ...]] = {IMAGES_FILE: images}
        if NOISE_FILE in self.files:
            points = self.files[NOISE_FILE].size // (row_size(NOISE_FILE, images) * self.length)
            shapes[NOISE_FILE] = images if points == 1 else (points, *images)
        return shapes

    @property
    def size_text(self) -> str:
        """Sides of the pictures: ``64``, or ``96x64``."""
        if self.framing is not None:
            return self.framing.size_text
        _, height, width = self.shapes.get(IMAGES_FILE, (3, self.image_size, self.image_size))
        return size_text(width, height)


class StoreDataset(Dataset[dict[str, Tensor]]):
    """The rows of a store.

    Pickles as a path, a recipe and numbers of rows. Each process maps the files when it first reads, and all share one
    page cache. Items are dicts of the store's entries and, if the source has labels, ``labels`` (int64 scalar).

    Args:
        path: a store's folder.
        recipe: the arguments of :func:`rectified_flow.open_dataset` that open the pictures again.

    Attributes:
        rows: the store's rows that are items, in this order; None if all are.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.recipe = dict(recipe or {})
        self.rows: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._length = self.info.length

    def subset(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> Self:
        """These rows of the store as a dataset of the same kind."""
        part = copy(self)
        part.rows, part._length = np.asarray(rows, dtype=np.int64), len(rows)
        return part

    @property
    def whole(self) -> Self:
        """All rows of the store."""
        everything = copy(self)
        everything.rows, everything._length = None, self.info.length
        return everything

    @cached_property
    def info(self) -> StoreInfo:
        """The contents of the store's ``info.json``."""
        return read_document(self.path / INFO_FILE, StoreInfo)

    @cached_property
    def entries(self) -> dict[str, np.ndarray[Any, Any]]:
        """All rows of the store by entry of an item, read-only memory maps ``[n, ...]``."""
        return {Path(name).stem: self._map(name, shape) for name, shape in self.info.shapes.items()}

    @cached_property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """All labels of the store, a read-only memory map ``[n]``."""
        with reading(self.path / LABELS_FILE):
            return np.load(self.path / LABELS_FILE, mmap_mode="r")

    @property
    def class_names(self) -> list[str]:
        """Names by label; empty if there are no labels."""
        return list(self.info.class_names)

    @property
    def conditions(self) -> dict[str, Condition]:
        """The conditions that a network can be given: labels, if there are any."""
        names = self.class_names
        return {"labels": Labels(len(names), tuple(names))} if names else {}

    @property
    def description(self) -> str:
        """The pictures in a line for a person."""
        labels = f", {len(self.class_names)} classes" if self.class_names else ""
        return f"{self.info.source}: {len(self)} images of {self.info.size_text} px{labels}"

    @property
    def fingerprint(self) -> str:
        """Hash of all rows and labels: equal data has equal fingerprints, wherever it came from."""
        if self.rows is None:
            return self.content
        return blake2b(self.content.encode() + self.rows.tobytes(), digest_size=16).hexdigest()

    @property
    def content(self) -> str:
        """Hash of what the store holds, or was made from."""
        return self.info.content

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The items of ``indices`` with a leading batch dimension, in one read."""
        rows = self._rows_of(indices)
        items = {name: torch.from_numpy(values[rows]) for name, values in self.entries.items()}
        return {**items, **self.condition_values(indices)}

    def condition_values(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The conditions of the items of ``indices``, by name."""
        return {"labels": torch.from_numpy(self.labels[self._rows_of(indices)])} if self.class_names else {}

    def _rows_of(self, indices: Sequence[int]) -> list[int]:
        """The store's rows of some items."""
        return list(indices) if self.rows is None else self.rows[list(indices)].tolist()

    def _map(self, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        with reading(self.path / name):
            return np.memmap(self.path / name, dtype_of(name), "r", shape=(self.info.length, *shape))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        batch = self.read_batch(indices)
        return [{name: values[row] for name, values in batch.items()} for row in range(len(indices))]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "recipe": self.recipe, "rows": self.rows, "_length": self._length}


class ImageDataset(StoreDataset):
    """The pictures of a store: items have ``images``, uint8 ``[c, h, w]``, RGB or RGBA."""

    @property
    def images(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All images of the store, a read-only memory map ``[n, c, h, w]``."""
        return self.entries["images"]

    def read_pictures(self, indices: Sequence[int]) -> Tensor:
        """Pictures to compare and to show, uint8 ``[b, 3, h, w]``: the centre of each row, over white."""
        images = self.read_batch(indices)["images"]
        if self.info.framing is None:
            return images
        space = Pixels(self.info.framing.shape)
        return space.render(space.decode(space.encode(images)))


def dtype_of(name: str) -> np.dtype[Any]:
    """The type of the values in a store's file ``NAME.DTYPE``."""
    return np.dtype(Path(name).suffix[1:])


def row_size(name: str, shape: Sequence[int]) -> int:
    """Bytes of a row of that shape in a store's file ``NAME.DTYPE``."""
    return dtype_of(name).itemsize * prod(shape)


def find_damage(path: Path) -> str | None:
    """The damage of the store at ``path`` in words, or None.

    Sizes and times are compared; only where a time differs, as after copying, the contents are read.

    Raises:
        UsageError: if a file may not be read, or a newer version of this project wrote it, which is no damage.
    """
    try:
        info = read_document(path / INFO_FILE, StoreInfo)
        stats = {name: _stat(path / name) for name in (*info.shapes, LABELS_FILE, *info.files)}
        for name, made in info.files.items():
            if stats[name].st_size != made.size:
                return f"{name} has {stats[name].st_size} bytes, and had {made.size}"
        # Whole seconds: some file systems keep no more.
        if any(int(stats[name].st_mtime) != made.time for name, made in info.files.items()):
            if _hash_of(path, info) != info.content:
                return "other pixels or labels"
            with suppress(OSError):  # read-only: the contents are read each time
                for name, made in info.files.items():
                    os.utime(path / name, (made.time, made.time))
        if not info.sha256:
            with suppress(OSError):
                write_document(path / INFO_FILE, read_document(path / INFO_FILE, dict[str, Any]))
    except NewerError:
        raise
    except DamageError as error:
        return str(error)
    return None


def _hash_of(path: Path, info: StoreInfo) -> str | None:
    """Hash of what is in a store now; None if its labels cannot even be read."""
    with reading(path), suppress(ValueError, EOFError):
        return hash_contents(path, *info.files)
    return None


def _stat(path: Path) -> os.stat_result:
    with reading(path), open_regular(path) as file:
        return os.fstat(file.fileno())


def describe_files(path: Path, *names: str) -> dict[str, dict[str, int]]:
    """Size [bytes] and time [s] of a store's files, by which a later change is noticed."""
    stats = {name: (path / name).stat() for name in names}
    return {name: {"size": stat.st_size, "time": int(stat.st_mtime)} for name, stat in stats.items()}


def hash_contents(path: Path, *names: str) -> str:
    """Hash of what is in the named files of a store, the labels last."""
    content = blake2b(digest_size=16)
    for name in names:
        if name != LABELS_FILE:
            with (path / name).open("rb") as file:
                while chunk := file.read(1 << 22):
                    content.update(chunk)
    content.update(repr(np.load(path / LABELS_FILE).tolist()).encode())
    return content.hexdigest()
