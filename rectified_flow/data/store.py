"""The files of a store, and datasets that read its rows with their conditions and sources, a whole batch at a time.

A store is an artifact: a file ``NAME.DTYPE`` ``[n, ...]`` for each entry of its items, such as ``images.uint8``,
``labels.npy`` ``[n]`` (-1 without labels), ``info.json``, and the manifest by which a later change is noticed.
"""

import re
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self, cast
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow.condition import Condition, Labels
from rectified_flow.data.framing import Framing
from rectified_flow.data.metadata import Column
from rectified_flow.data.stream import image_indices
from rectified_flow.errors import UsageError
from rectified_flow.flags import Positive
from rectified_flow.randomness import mix
from rectified_flow.registry import build
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import read_document, reading

LABELS_FILE, INFO_FILE, RECIPE_FILE, ORIGINALS_FILE = "labels.npy", "info.json", "recipe.json", "originals.json"


class Original(NamedTuple):
    """The picture that a row of a store was made from."""

    name: str
    width: Positive
    """Width before it was resized [px]."""
    height: Positive
    """Height before it was resized [px]."""


@dataclass(frozen=True)
class StoreInfo:
    """The contents of ``info.json``."""

    content: str
    """Hash of the rows and labels."""
    source: str
    """Source of the images, for display."""
    length: Positive
    image_size: Positive
    rows: dict[str, tuple[Positive, ...]]
    """Shape of a row by file, without the file of labels."""
    class_names: list[str] = field(default_factory=list)
    """Names of the classes by label; empty without labels."""
    skipped: list[str] = field(default_factory=list)
    """Broken images that were left out."""
    pictures: str | None = None
    """Fingerprint of the pictures whose latents are stored; None for other rows."""
    framing: Framing | None = None
    """Framing of the images that are stored, or from which the rows were computed; None for other rows."""
    notes: list[str] = field(default_factory=list)
    """Sentences about the stored images that a person should know: how they were chosen, and which are faulty."""
    space: dict[str, Any] | None = None
    """Description of the space of the stored rows, with the scale of all of them; None for pictures."""


def mapped(file: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the array in a store's file ``NAME.DTYPE`` as a memory map, which must not be modified."""
    return np.memmap(file, file.suffix[1:], "c", shape=shape)  # some network file systems refuse the shared map of "r"


class StoreDataset(Dataset[dict[str, Tensor]]):
    """The rows of a store.

    Pickles as a path, a description and numbers of rows. Each process maps the files when it first reads, and all share
    one page cache. Items are dicts of the store's entries and, if the source has labels, ``labels`` (int64 scalar).

    Args:
        path: a store's folder.
        described: a registered object that opens the images again, such as
            :class:`rectified_flow.data.open.Pictures`.

    Attributes:
        rows: the store's rows that are items, in this order; None if all are.
        source: pictures that items lead from, read as the entry ``source``; None without them.
        partners: the item of ``source`` for each row of this store, int64 ``[n]``. None if none belong together: items
            then have another source in each epoch, and each source is read once before any is read again.
        columns: further conditions of the store's rows by name, from columns beside the pictures.
        seed: seed of the sources of unpaired items, and of the choice among several captions, which is no part of the
            fingerprint.
        remarks: sentences about the source of the rows and how they were chosen, beside the notes of the store.
    """

    varies = True  # an item may have another source, or another caption, in each epoch
    remarks: tuple[str, ...] = ()

    def __init__(self, path: Path, described: object = None) -> None:
        self.path = Path(path)
        self.described = described
        self.rows: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.source: StoreDataset | None = None
        self.partners: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.columns: dict[str, Column] = {}
        self.seed = 0

    @property
    def is_unpaired(self) -> bool:
        """Whether an item has another source in each epoch."""
        return self.source is not None and self.partners is None

    def changed(self, **attributes: Any) -> Self:
        """Return a dataset on the same store with other attributes."""
        other = copy(self)
        vars(other).update(attributes)
        return other

    def subset(self, items: Sequence[int] | np.ndarray[Any, Any]) -> Self:
        """Return some items as a dataset of the same kind."""
        chosen = np.asarray(items, dtype=np.int64)
        return self.changed(rows=chosen if self.rows is None else self.rows[chosen])

    @cached_property
    def info(self) -> StoreInfo:
        """The contents of the store's ``info.json``."""
        return read_document(self.path / INFO_FILE, StoreInfo)

    @cached_property
    def entries(self) -> dict[str, np.ndarray[Any, Any]]:
        """All rows of the store by entry of an item, as memory maps ``[n, ...]``, which must not be modified."""
        files = {self.path / name: (self.info.length, *shape) for name, shape in self.info.rows.items()}
        with reading(self.path):
            return {file.stem: mapped(file, shape) for file, shape in files.items()}

    @cached_property
    def space(self) -> Space:
        """The space of the stored rows, with the scale of all of them."""
        if self.info.space is not None:
            return cast(Space, build(self.info.space))
        return Pixels(None if self.info.framing is None else self.info.framing.shape)

    @cached_property
    def stored_labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """All labels of the store, as a memory map ``[n]``, which must not be modified; -1 without labels."""
        with reading(self.path / LABELS_FILE):
            return cast(np.ndarray[Any, Any], np.load(self.path / LABELS_FILE, mmap_mode="c"))

    @property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The labels of the items ``[n]``, -1 without labels."""
        return self.stored_labels if self.rows is None else self.stored_labels[self.rows]

    @property
    def class_names(self) -> list[str]:
        """Names by label; empty if there are no labels."""
        return list(self.info.class_names)

    @property
    def conditions(self) -> dict[str, Condition]:
        """The conditions that a network can be given: labels, if there are any, and those of columns."""
        names = self.class_names
        labels: dict[str, Condition] = {"labels": Labels(len(names), tuple(names))} if names else {}
        return labels | {name: column.kind for name, column in self.columns.items()}

    @property
    def description(self) -> str:
        """The pictures in a line for a person."""
        size = self.info.framing.size_text if self.info.framing else self.info.image_size
        labels = f", {len(self.class_names)} classes" if self.class_names else ""
        how = "unpaired" if self.is_unpaired else "paired by name"
        source = f", from {len(self.source)} of {self.source.info.source}, {how}" if self.source is not None else ""
        return f"{self.info.source}: {len(self)} images of {size} px{labels}{source}"

    @property
    def fingerprint(self) -> str:
        """Hash of all rows and labels: equal data has equal fingerprints, wherever it came from."""
        # Latents have the fingerprint of their pictures, since the autoencoder is part of the flow.
        content = self.info.pictures or self.info.content
        parts = [] if self.rows is None else [self.rows.tobytes()]
        if self.source is not None:
            parts += [self.source.fingerprint.encode(), b"" if self.partners is None else self.partners.tobytes()]
        parts += [f"{name} {column.fingerprint}".encode() for name, column in self.columns.items()]
        return blake2b(content.encode() + b"".join(parts), digest_size=16).hexdigest() if parts else content

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the items of ``indices`` with a leading batch dimension, in one read."""
        return {**self.read_entries(indices), **self.condition_values(indices), **self._read_sources(indices)}

    def condition_values(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the conditions of the items of ``indices`` by name."""
        labels = {"labels": torch.from_numpy(self.stored_labels[self._rows_of(indices)])} if self.class_names else {}
        return labels | {name: self.columns[name].read(numbers) for name, numbers in self._numbers_of(indices).items()}

    def condition_texts(self, indices: Sequence[int]) -> dict[str, list[str]]:
        """Return the written values of the columns of the items of ``indices``, empty where there is none."""
        columns, numbers = self.columns, self._numbers_of(indices)
        return {name: ["" if at < 0 else columns[name].texts[at] for at in some] for name, some in numbers.items()}

    def _numbers_of(self, indices: Sequence[int]) -> dict[str, list[int]]:
        """Return the number of each item's value in each column, one of several captions in each epoch; -1 for none."""
        draws = [mix(self.seed, "captions", index) for index in indices] if self.columns else []
        return {name: column.numbers(self._rows_of(indices), draws) for name, column in self.columns.items()}

    def sources_of(self, indices: Sequence[int]) -> list[int]:
        """Return the numbers of the items of :attr:`source` that are the sources of the items ``indices``."""
        if self.source is None:
            return []
        if self.partners is None:
            return image_indices(indices, len(self.source), mix(self.seed, "sources")).tolist()
        return self.partners[self._rows_of(indices)].tolist()

    def _read_sources(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the sources of the items of ``indices``, if they have any."""
        if self.source is None:
            return {}
        [sources] = self.source.read_entries(self.sources_of(indices)).values()
        return {"source": sources}

    def read_entries(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the store's entries of the items of ``indices``, with a leading batch dimension, in one read."""
        rows = self._rows_of(indices)
        return {name: torch.from_numpy(values[rows]) for name, values in self.entries.items()}

    def _rows_of(self, indices: Sequence[int]) -> list[int]:
        """Return the numbers of the store's rows of some items; the numbers of later epochs are those of the first."""
        items = [index % len(self) for index in indices]
        return items if self.rows is None else self.rows[items].tolist()

    def __len__(self) -> int:
        return self.info.length if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        batch = self.read_batch(indices)
        return [{name: values[row] for name, values in batch.items()} for row in range(len(indices))]

    def __getstate__(self) -> dict[str, Any]:
        # Attributes that were read from the store are not pickled: other processes read them themselves.
        kind = type(self)
        return {n: value for n, value in vars(self).items() if not isinstance(getattr(kind, n, None), cached_property)}


class ImageDataset(StoreDataset):
    """The pictures of a store: items have ``images``, uint8 ``[c, h, w]``, RGB or RGBA, or measurements of any type.

    Attributes:
        table: names of the columns beside the pictures.
    """

    table: Sequence[str] = ()

    @property
    def notes(self) -> list[str]:
        """Sentences about the pictures and their source that a person should know."""
        return [*self.remarks, *self.info.notes]

    @cached_property
    def originals(self) -> list[Original]:
        """The picture that each row of the store was made from."""
        return read_document(self.path / ORIGINALS_FILE, list[Original])

    @property
    def names(self) -> list[str]:
        """The name of each picture in its source: its path in the folder, or the number of its row in the table."""
        return [self.originals[row].name for row in self._rows_of(range(len(self)))]

    def name_of(self, item: int) -> str:
        """Return the name of the picture of an item in its source."""
        return self.originals[self._rows_of([item])[0]].name

    def read_pictures(self, indices: Sequence[int]) -> Tensor:
        """Pictures to compare and to show, uint8 ``[b, 3, h, w]``: the centre of each row, over white."""
        data = self.space.decode(self.space.encode(self.read_entries(indices)["images"]))
        return self.space.medium.render(data)


def pair_by_name(
    pictures: ImageDataset, source: ImageDataset, *, skip_unpaired: bool, exclude: Sequence[str] = ()
) -> ImageDataset:
    """Return the pictures, each with the picture of the same name in ``source`` as its source.

    With ``skip_unpaired``, pictures without a partner of the same shape are left out, with a remark. The
    names to ``exclude`` may have a partner, as they are left out of the pictures alone.
    """
    mine, theirs = ([str(Path(name).with_suffix("")) for name in each.names] for each in (pictures, source))
    found = _partners([*pictures.names, *exclude], source.names)
    partners = [
        row if row is not None and _is_alike(original, source.originals[row]) else -1
        for original, row in zip(pictures.originals, found[: len(pictures)], strict=True)
    ]
    paired = [row for row, partner in enumerate(partners) if partner >= 0]
    taken = {*partners, *found[len(pictures) :]}
    lonely = {mine[row] for row, partner in enumerate(partners) if partner < 0}
    beside = {name for row, name in enumerate(theirs) if row not in taken}
    lonely |= {name for name in beside if {*map(str, Path(name).parents)}.isdisjoint(exclude)}
    if alone := sorted(lonely):
        where = f"`source_path` {source.info.source} and `dataset_path` {pictures.info.source}"
        missing = f"{len(alone)} pictures in {where} have no partner of the same name and shape, such as {alone[0]}"
        if not paired or not skip_unpaired:
            raise UsageError(f"{missing}: add the partner, or pass `skip_broken_images`")
        pictures = pictures.changed(remarks=(*pictures.remarks, f"{missing}; they are left out"))
    return pictures.changed(source=source, partners=np.asarray(partners)).subset(paired)


def _partners(names: Sequence[str], others: Sequence[str]) -> list[int | None]:
    """Return the number of the partner of each name among the others; None if there is none.

    Names are compared as they are, then without their suffixes, then in any case and Unicode normalisation, then
    without an ending for the scale or the role, as in ``0001x4.png`` and ``0001_HR.png``. A name that is not unique on
    both sides, such as that of ``1.jpg`` beside ``1.png``, is not matched without its suffix.
    """
    found: list[int | None] = [None] * len(names)
    for key in PAIR_KEYS:
        taken = {row for row in found if row is not None}
        free = [number for number, row in enumerate(found) if row is None]
        mine = Counter(key(names[number]) for number in free)
        theirs = Counter(key(name) for row, name in enumerate(others) if row not in taken)
        row_of = {key(name): row for row, name in enumerate(others) if row not in taken}
        for number in free:
            name = key(names[number])
            found[number] = row_of[name] if mine[name] == theirs[name] == 1 else None
    return found


def _without_suffix(name: str) -> str:
    return str(Path(name).with_suffix(""))


def _folded(name: str) -> str:
    return normalize("NFC", normalize("NFC", _without_suffix(name)).casefold())


ROLE = re.compile(r"(?:(?<=\d)x\d|[-_ .](?:x\d|lr|hr|gt|input|target|source|before|after))+$")
"""Endings in which the two names of a pair may differ: a scale, or a role such as input or target; lower case."""


def _without_role(name: str) -> str:
    return ROLE.sub("", _folded(name))


PAIR_KEYS = (str, _without_suffix, _folded, _without_role)


def _is_alike(one: Original, other: Original) -> bool:
    """Return whether two pictures have the same ratio of width to height, up to one pixel."""
    return abs(one.width * other.height - one.height * other.width) <= max(one.width, one.height, *other[1:])
