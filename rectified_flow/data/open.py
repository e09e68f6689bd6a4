"""Open the pictures of a description, and read the metadata and the file names of the pictures."""

import os
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset

from rectified_flow.arguments import parameters_of
from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.framing import Bits, Crop, Framing, Resize
from rectified_flow.data.metadata import ColumnSpec, choose_columns
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource, find_dataset_file
from rectified_flow.data.sources.listing import find_files, list_folder
from rectified_flow.data.sources.synthetic_flowers import SYNTHETIC_FLOWERS, SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.errors import UsageError
from rectified_flow.flags import Positive
from rectified_flow.parts import choose, split_part, typed_options
from rectified_flow.registry import find, names, register
from rectified_flow.system.files import printable, usable_path
from rectified_flow.system.pictures import content_of

FOR_PIXELS = {"alpha", "grey", "resize", "bits"}
"""Arguments of the framing that only pictures obey: other readers keep the channels and the type of their files."""


@register
@dataclass(frozen=True)
class Pictures:
    """Pictures, or measurements, as a run is trained on them: where they are, and how they are framed.

    Args:
        dataset: ``synthetic-flowers``, a hub id or a registered dataset; unused if ``dataset_path`` is given.
        dataset_path: a folder of images, or of a dataset in one of the hub's layouts.
        image_size: short side in pixels.
        split: split of a dataset of the hub, or of a folder with a subfolder per split.
        cache_dir: folder for decoded images; by default the user's cache folder.
        skip_broken_images: skip images that cannot be decoded instead of raising.
        aspect_ratio: width:height.
        crop: part to keep: ``center``, ``random`` or ``none``. For random parts, images have a margin, and the
            space of a flow must know the shape of the parts: ``Pixels((3, image_size, image_size))``.
        alpha: keep transparency, as a fourth channel.
        grey: keep the brightness alone, as a single channel.
        resize: filter that resizes the pictures: ``lanczos`` or ``nearest``.
        bits: number of bits of the values in files of 16 bits, which are read as pictures.
        space: name of the space of the data, and its arguments ``KEY=VALUE``. ``Fields`` reads the files of the folder
            as measurements, in their own type, instead of as uint8 pictures. With ``channels_last=True``, the last axis
            of an array is that of the channels; with ``store_bits=16``, floats are stored with 16 bits.
        exclude: images to leave out: paths relative to the folder, or numbers of rows.
        options: arguments ``KEY=VALUE`` of a registered dataset.
        image_column: column of the images of a table; by default one with a conventional name such as ``image``.
        label_column: column of the labels of a table; by default one with a conventional name such as ``label``.
        limit: largest number of images, which are spread over the source; all if not given.
    """

    dataset: str = ""
    dataset_path: Path | None = None
    image_size: Positive = 64
    split: str = "train"
    cache_dir: Path | None = None
    skip_broken_images: bool = False
    aspect_ratio: str = "1:1"
    crop: Crop = "center"
    alpha: bool = False
    grey: bool = False
    resize: Resize = "lanczos"
    bits: Bits = 16
    space: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    limit: Positive | None = None
    image_column: str = ""
    label_column: str = ""

    @property
    def framing(self) -> Framing:
        """The form in which the pictures are stored and trained on."""
        return Framing.of(
            self.image_size,
            self.aspect_ratio,
            alpha=self.alpha,
            crop=self.crop,
            grey=self.grey,
            resize=self.resize,
            bits=self.bits,
        )

    @property
    def _columns(self) -> dict[str, str]:
        """The columns of a table."""
        return {"image_column": self.image_column, "label_column": self.label_column}

    def find(self) -> ImageSource:
        """Find the files or the table of the pictures, without those to exclude.

        Raises:
            UsageError: if they cannot be found, or the framing makes no sense.
        """
        source = self._find()
        if self.exclude and not source.excluded:  # a FileFolder has left them out already
            source.exclude(self.exclude)
        return source

    def _find(self) -> ImageSource:
        """Find the files, or the whole table."""
        reader, options, _ = reader_of(self.space)
        if self.dataset_path is None:
            if self.dataset in names("dataset"):
                words = (self.dataset, *self.options)
                return cast(ImageSource, registered_dataset(words, self.image_size, self.cache_dir))
            if self.dataset == SYNTHETIC_FLOWERS:
                return SyntheticFlowers(2 * max(self.framing.stored_size))
            if os.path.isdir(self.dataset):
                raise UsageError(f"`dataset` {self.dataset} is a folder: pass it as `dataset_path` {self.dataset}")
            return HuggingFaceSource(self.dataset, self.split, **self._columns)
        folder = existing_folder("dataset_path", self.dataset_path)
        listing = list_folder(folder)
        table = find_dataset_file(folder, listing.files)
        for name, column in self._columns.items():
            if column and table is None:
                raise UsageError(f"`{name}` {column} is for tables, and {folder} is a folder of files: leave it out")
        if reader is not None:
            return cast(ImageSource, reader(folder, split=self.split, **typed_options("space", reader, options)))
        if table is not None:
            return HuggingFaceSource(folder, self.split, **self._columns)
        source = FileFolder(folder, split=self.split, listing=listing, exclude={*self.exclude})
        for other, _most, odd in _claims(listing.files):
            if odd:
                found = f"{len(odd)} files of {other.kind} are read as pictures, such as {printable(odd[0])}"
                source.notes.append(f"{found}: `space` {other.space_name} reads all files as {other.kind}")
        return source

    def open(self, source: ImageSource | None = None) -> ImageDataset:
        """Open the pictures, decoding them first if they are not in a store yet.

        Args:
            source: what :meth:`find` returns, if it is known.

        Raises:
            UsageError: if the pictures cannot be found, read or stored.
        """
        found = self.find() if source is None else source
        path = open_store(
            found,
            self.framing,
            cache_dir=self.cache_dir,
            skip_broken_images=self.skip_broken_images,
            limit=self.limit,
        )
        table = found.column_names()  # which may add a note
        return ImageDataset(path, self).changed(table=table, remarks=tuple(found.notes))


def existing_folder(name: str, path: Path) -> Path:
    """Return the real path of a folder, which may begin with ``~``.

    Args:
        name: the argument that names the folder, for error messages.
        path: the folder.

    Raises:
        UsageError: if there is no such folder.
    """
    folder = usable_path(f"`{name}`", path).resolve()
    if folder.is_dir():
        return folder
    what = (content_of(folder) or f"a file: pass its folder {printable(folder.parent)}") if folder.is_file() else ""
    remedy = f", but {what}" if what else ": pass the folder where the files are now"
    raise UsageError(f"`{name}` {folder} is not a folder{remedy}")


def open_dataset(
    dataset: str | Path = "",
    dataset_path: str | Path | None = None,
    *,
    space: str | Sequence[str] = (),
    exclude: Sequence[str] = (),
    cache_dir: str | Path | None = None,
    source: ImageSource | None = None,
    **framing: Any,
) -> ImageDataset:
    """Open a dataset as images, decoding the images first if they are not in a store yet.

    Args:
        dataset: ``synthetic-flowers``, a hub id or a folder; unused if ``dataset_path`` is given.
        dataset_path: a folder of images, or of a dataset in one of the hub's layouts.
        space: name of the space of the data, or a list of the name and its arguments ``KEY=VALUE``.
        exclude: images to leave out: paths relative to the folder, or numbers of rows.
        cache_dir: folder for decoded images; by default the user's cache folder.
        source: the source of the images, in place of the one that ``dataset`` or ``dataset_path`` names.
        framing: further arguments of :class:`Pictures`, ``image_size`` among them.

    Raises:
        UsageError: if the ratio does not suit the size, an argument has no effect on files that the space reads, or the
            images cannot be found, read or stored.
    """
    if dataset_path is None and os.path.isdir(dataset):
        dataset, dataset_path = "", dataset
    space = (space,) if isinstance(space, str) else tuple(space)
    pictures = Pictures(
        str(dataset),
        None if dataset_path is None else Path(dataset_path),
        cache_dir=None if cache_dir is None else Path(cache_dir),
        space=space,
        exclude=tuple(map(str, exclude)),
        **framing,
    )
    check_obeyed(space, {name for name in framing if getattr(pictures, name) != getattr(Pictures, name)})
    if source is not None and pictures.exclude:
        source = copy(source)
        source.exclude(pictures.exclude)
    return pictures.open(source)


class OxfordFlowersDataset(ImageDataset):
    """Oxford Flowers 102 as uint8 images ``[3, image_size, image_size]`` with labels and true flower names.

    Args:
        image_size: side in pixels.
        split: ``train`` or ``test``.
        source: a hub id, or a local folder of the same layout.
        options: further arguments of :func:`rectified_flow.open_dataset`, such as ``cache_dir``.

    Raises:
        UsageError: if the source cannot be read.
    """

    def __init__(
        self, image_size: int = 64, split: str = "train", source: str | Path = OXFORD_FLOWERS, **options: Any
    ) -> None:
        opened = open_dataset(source, image_size=image_size, split=split, **options)
        super().__init__(opened.path, opened.described)
        self.table, self.remarks = opened.table, opened.remarks


def registered_dataset(words: Sequence[str], image_size: int, cache_dir: Path | None) -> ImageSource | Dataset[Any]:
    """Build a registered dataset by its name and arguments: a source of images, or items of any kind.

    Raises:
        UsageError: if the dataset is not registered, or refuses its arguments.
    """
    built: ImageSource | Dataset[Any]
    built = choose("dataset", "dataset", words).build(image_size=image_size, cache_dir=cache_dir)
    return built


def find_columns(pictures: ImageDataset, wanted: Sequence[str], source: ImageSource) -> list[ColumnSpec]:
    """Return the columns of pictures that are asked for, from their source."""
    number = {source.name_of(number): number for number in range(len(source))}
    rows = {original.name: number[original.name] for original in pictures.originals}
    return choose_columns(source.read_table(), rows, wanted, pictures.info.source)


def reader_of(space: Sequence[str]) -> tuple[Any, list[str], list[str]]:
    """Return the class that reads the files of a space, None for pictures; its arguments; and those of the space."""
    name, options = split_part(space)
    readers = (find("space", "reader", each) for each in names("reader"))
    reader = next((each for each in readers if each.space_name == name), None)
    known = {} if reader is None else parameters_of(reader)
    of_reader = [option for option in options if option.partition("=")[0] in known]
    return reader, of_reader, [option for option in options if option not in of_reader]


def check_obeyed(space: Sequence[str], given: Collection[str]) -> None:
    """Raise a UsageError if one of the arguments that a user gave has no effect on the files that a space reads."""
    reader = reader_of(space)[0]
    for name in sorted(given) if reader is not None else ():
        if name.removeprefix("source_") in FOR_PIXELS:
            raise UsageError(f"`{name}` has no effect on {reader.space_name}: leave it out")


def space_of_folder(folder: Path) -> str | None:
    """Return the space of most files in a folder; None for pictures."""
    return next((reader.space_name for reader, is_most, _ in _claims(find_files(folder)) if is_most), None)


def _claims(files: Sequence[Path]) -> Iterator[tuple[Any, bool, list[Path]]]:
    """Yield each class that reads folders, with its claim on the files of a folder."""
    for name in names("reader"):
        reader = find("space", "reader", name)
        yield reader, *reader.claim(files)
