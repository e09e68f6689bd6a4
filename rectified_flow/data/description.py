"""The data of a run as registered objects: the block ``data`` of its ``config.json``, which :func:`open_data` opens.

A run, its evaluation, the sheet of its nearest pictures and the students of a teacher open their data in this one way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from torch.utils.data import Dataset

from rectified_flow.condition import ConditionSpecs, WrittenCondition
from rectified_flow.data.degraded import Degraded
from rectified_flow.data.framing import Bits, Resize
from rectified_flow.data.metadata import Column
from rectified_flow.data.open import Pictures, existing_folder, find_columns, registered_dataset
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.store import ImageDataset, pair_by_name
from rectified_flow.distributed import join_processes
from rectified_flow.errors import UsageError
from rectified_flow.flags import Fraction, Natural, Positive, Seed
from rectified_flow.registry import build, register
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.space import Space
from rectified_flow.system.terminal import line


@register
@dataclass(frozen=True)
class Columns:
    """Columns beside the pictures that are conditions.

    Args:
        names: names of the columns, each perhaps with ``=TYPE``; or ``all``.
        text_encoder: folder or hub id of the frozen encoder of captions; by default captions are bags of words.
        text_tokens: number of caption tokens that the network attends to.
    """

    names: tuple[str, ...]
    text_encoder: str | None = None
    text_tokens: Natural = 0

    def add_to(
        self, pictures: ImageDataset, source: ImageSource, kinds: ConditionSpecs | None, seed: int
    ) -> ImageDataset:
        """Return the pictures with these columns as conditions, and print a summary of each. Collective."""
        state, columns = join_processes(), dict[str, Column]()
        for found in find_columns(pictures, self.names, source):
            if found.name in columns:
                twice = f"another column is {found.name}, too; rename one of them"
                raise UsageError(f"`condition_on` {found.column}: {twice}")
            if kinds is not None:
                kind = kinds.get(found.name)
            else:
                kind = found.kind.fit(found.texts, text_encoder=self.text_encoder, text_tokens=self.text_tokens)
                state.print(line(found.column, found.summary))
            if isinstance(kind, WrittenCondition):
                try:
                    values = kind.stored(found.texts, pictures.path.parent, state)
                except UsageError as error:
                    raise UsageError(f"the column {found.column} of {pictures.info.source}: {error}") from error
                columns[found.name] = Column(kind, found.first, found.texts, values)
        if self.text_encoder and not any(each.kind.is_text for each in columns.values()):
            raise UsageError("`text_encoder` has no effect: no column of `condition_on` has captions; leave it out")
        return pictures.changed(columns=columns, seed=seed)


@register
@dataclass(frozen=True)
class Sources:
    """Source pictures in a folder, which are translated to the pictures of a run.

    Args:
        path: the folder.
        paired: whether files of the same name belong together; otherwise pairs are random.
        resize: filter that resizes the sources.
        bits: number of bits of the values in their files of 16 bits; by default that of the pictures.
    """

    path: Path
    paired: bool = False
    resize: Resize = "lanczos"
    bits: Bits | None = None

    def described(self, like: Pictures) -> Pictures:
        """Return the description of the sources, which are framed ``like`` the pictures."""
        own = replace(like, dataset_path=self.path, image_column="", label_column="", exclude=(), limit=None)
        return replace(own, resize=self.resize, bits=self.bits or like.bits)

    def add_to(self, pictures: ImageDataset, like: Pictures, seed: int) -> ImageDataset:
        """Return the pictures with their sources, which are framed ``like`` the pictures."""
        existing_folder("source_path", self.path)  # so that an error names `source_path`, not `dataset_path`
        source = self.described(like).open()
        if not self.paired:
            return pictures.changed(source=source, seed=seed)
        return pair_by_name(pictures, source, skip_unpaired=like.skip_broken_images, exclude=like.exclude)


@register
@dataclass(frozen=True)
class PictureData:
    """Pictures with their columns and sources, and how some of them are held out of the training.

    Args:
        pictures: the pictures.
        columns: columns that are conditions.
        sources: source pictures, of a translation.
        degradation: makes the sources of a translation from the pictures.
        holdout: share of the pictures to hold out.
        seed: seed of the held-out pictures, of unpaired sources, and of the choice among several captions.
    """

    has_pictures: ClassVar[bool] = True

    pictures: Pictures
    columns: Columns | None = None
    sources: Sources | None = None
    degradation: Degradation | None = None
    holdout: Fraction = 0.0
    seed: Seed = 0

    @property
    def name(self) -> str:
        """The dataset in words: its folder or its id."""
        return str(self.pictures.dataset_path or self.pictures.dataset)

    @property
    def hub_id(self) -> str | None:
        """The id of the dataset on the hub; None for other data."""
        is_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", self.name) and not Path(self.name).exists()
        return self.name if self.pictures.dataset_path is None and is_id else None

    def find(self) -> ImageSource:
        """Find the pictures, without reading them."""
        return self.pictures.find()

    def open(self, source: ImageSource | None = None, kinds: ConditionSpecs | None = None) -> ImageDataset:
        """Open the pictures with their columns and their sources. Collective.

        Args:
            source: what :meth:`find` returns, if it is known.
            kinds: the conditions of a trained flow: its columns get these kinds, and all others are left out.

        Raises:
            UsageError: if something cannot be found, read or stored.
        """
        found = self.find() if source is None else source
        opened = self.pictures.open(found)
        if self.columns is not None:
            opened = self.columns.add_to(opened, found, kinds, self.seed)
        if self.sources is not None:
            opened = self.sources.add_to(opened, self.pictures, self.seed)
        return opened

    def moved(
        self, *, dataset_path: Path | None = None, source_path: Path | None = None, cache_dir: Path | None = None
    ) -> Self:
        """Return the same data in other folders, where these are given."""
        pictures, sources = self.pictures, self.sources
        if dataset_path is not None:
            pictures = replace(pictures, dataset_path=dataset_path)
        if cache_dir is not None:
            pictures = replace(pictures, cache_dir=cache_dir)
        if sources is not None and source_path is not None:
            sources = replace(sources, path=source_path)
        return replace(self, pictures=pictures, sources=sources)


@register
@dataclass(frozen=True)
class ItemData:
    """The items of a registered dataset, which need not be pictures.

    Args:
        dataset: name of the dataset and its arguments ``KEY=VALUE``.
        image_size: short side of pictures, for a dataset that has such an argument [px].
        cache_dir: folder for decoded data, for a dataset that has such an argument.
        degradation: makes the sources of a translation from the items.
        seed: seed of the random draws of the degradation.
    """

    has_pictures: ClassVar[bool] = False

    dataset: tuple[str, ...]
    image_size: Positive = 64
    cache_dir: Path | None = None
    degradation: Degradation | None = None
    seed: Seed = 0

    @property
    def name(self) -> str:
        """The dataset in words."""
        return self.dataset[0]

    @property
    def hub_id(self) -> None:
        """None: the dataset is one of a module."""

    def find(self) -> Dataset[Any]:
        """Open the items.

        Raises:
            UsageError: if the dataset is not registered, or refuses its arguments.
        """
        return cast(Dataset[Any], registered_dataset(self.dataset, self.image_size, self.cache_dir))

    def open(self, found: Dataset[Any] | None = None) -> Dataset[Any]:
        """Return what :meth:`find` returns, if it is known, or else open the items."""
        return self.find() if found is None else found

    def moved(self, *, cache_dir: Path | None = None, **_places: Path | None) -> Self:
        """Return the same items with another folder for decoded data, if it is given."""
        return self if cache_dir is None else replace(self, cache_dir=cache_dir)


RunData = PictureData | ItemData


def with_sources(dataset: Any, data: RunData, space: Space) -> Any:
    """Return the opened data with degraded ones as the sources of the items, if the data have a degradation."""
    return dataset if data.degradation is None else Degraded(dataset, data.degradation, space, data.seed)


def described_data(block: Mapping[str, Any], source: object) -> RunData | None:
    """Return the data that the block ``data`` of a ``config.json`` describes; None if it only names them in words.

    Args:
        block: the block.
        source: the file, for error messages.

    Raises:
        UsageError: if the block is damaged, or of a class that is not registered.
    """
    if "kind" not in block:
        return None
    try:
        data = build(block)
    except UsageError as error:
        raise UsageError(f"the data in {source}: {error}") from error
    if isinstance(data, Pictures):  # a run of the library
        return PictureData(data)
    if not isinstance(data, RunData):
        raise UsageError(f"the data in {source} are described as a {type(data).__name__}, which is no data")
    return data
