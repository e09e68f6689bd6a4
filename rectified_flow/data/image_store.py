"""The image store: decoded pictures in a memory map that every process shares.

A store is a folder: ``images.uint8`` ``[n, 3, s, s]``, ``labels.npy`` ``[n]`` (-1 without labels) and ``info.json``.
``info.json`` has a hash of the contents, and size and time of each file, by which a later change is noticed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow.networks.conditions import Condition, Labels

IMAGES_FILE, LABELS_FILE, INFO_FILE = "images.uint8", "labels.npy", "info.json"


class ImageDataset(Dataset[dict[str, Tensor]]):
    """The pictures of a store.

    Pickles as a path, a length and a recipe; each process maps the file when it first reads, and all share one page
    cache. Items are dicts of ``images`` (uint8 ``[3, s, s]``) and, if the source has labels, ``labels`` (int64 scalar).

    Args:
        path: a store's folder.
        recipe: the arguments of :func:`rectified_flow.open_dataset` that open these pictures again.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.recipe = dict(recipe or {})
        self._length: int = self.info["length"]

    @cached_property
    def info(self) -> dict[str, Any]:
        """The contents of the store's ``info.json``."""
        return dict(json.loads((self.path / INFO_FILE).read_text()))

    @cached_property
    def images(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All images, a read-only memory map ``[n, 3, s, s]``."""
        side = self.info["image_size"]
        return np.memmap(self.path / IMAGES_FILE, np.uint8, "r", shape=(len(self), 3, side, side))

    @cached_property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """All labels, a read-only memory map ``[n]``."""
        return np.load(self.path / LABELS_FILE, mmap_mode="r")

    @property
    def class_names(self) -> list[str]:
        """Names by label; empty if there are no labels."""
        return list(self.info["class_names"])

    @property
    def conditions(self) -> dict[str, Condition]:
        """The conditions that a network can be given: labels, if there are any."""
        names = self.class_names
        return {"labels": Labels(len(names), tuple(names))} if names else {}

    @property
    def description(self) -> str:
        """The pictures in a line for a person."""
        labels = f", {len(self.class_names)} classes" if self.class_names else ""
        return f"{self.info['source']}: {len(self)} images of {self.info['image_size']} px{labels}"

    @property
    def fingerprint(self) -> str:
        """Hash of all pixels and labels: equal data has equal fingerprints, wherever it came from."""
        return str(self.info["content"])

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The items of ``indices`` with a leading batch dimension, in one read."""
        return {"images": torch.from_numpy(self.images[list(indices)]), **self.condition_values(indices)}

    def condition_values(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The conditions of the items of ``indices``, by name."""
        return {"labels": torch.from_numpy(self.labels[list(indices)])} if self.class_names else {}

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
        return {"path": self.path, "recipe": self.recipe, "_length": self._length}


def find_damage(path: Path) -> str | None:
    """The damage of the store at ``path`` in words, or None.

    Sizes and times are compared; only where a time differs, as after copying, the contents are read.
    """
    try:
        info = json.loads((path / INFO_FILE).read_text())
        stats = {name: (path / name).stat() for name in info["files"]}
        for name, made in info["files"].items():
            if stats[name].st_size != made["size"]:
                return f"{name} has {stats[name].st_size} bytes, and had {made['size']}"
        # Whole seconds: some file systems keep no more.
        if all(int(stats[name].st_mtime) == made["time"] for name, made in info["files"].items()):
            return None
        if hash_contents(path, *info["files"]) != info["content"]:
            return "other pixels or labels"
        with suppress(OSError):  # read-only: the contents are read each time
            for name, made in info["files"].items():
                os.utime(path / name, (made["time"], made["time"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


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
