"""Open a dataset from the values of flags, and read the metadata and the file names of its pictures."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from accelerate import PartialState

from rectified_flow.data.build import ImageSource, open_store
from rectified_flow.data.fields import FIELD_SUFFIXES
from rectified_flow.data.framing import Crop, Framing, StoreBits
from rectified_flow.data.metadata import Table
from rectified_flow.data.sources.field_folder import FieldFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource, find_dataset_file
from rectified_flow.data.sources.image_folder import IMAGE_SUFFIXES, ImageFolder, find_files
from rectified_flow.data.sources.synthetic_flowers import SYNTHETIC_FLOWERS, SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.flags import Positive, as_plain
from rectified_flow.system.files import check_document, printable, usable_path
from rectified_flow.system.terminal import escaped


def open_dataset(
    dataset: str,
    dataset_path: str | Path | None = None,
    *,
    image_size: Positive,
    split: str = "train",
    cache_dir: str | Path | None = None,
    skip_broken_images: bool = False,
    aspect_ratio: str = "1:1",
    crop: Crop = "center",
    alpha: bool = False,
    fields: bool = False,
    channels_last: bool | None = None,
    store_bits: StoreBits = 32,
    source: ImageSource | None = None,
) -> ImageDataset:
    """Open a dataset as images of ``image_size`` px, decoding the images first if they are not in a store yet.

    Args:
        dataset: ``synthetic-flowers`` or a hub id; unused if ``dataset_path`` is given.
        dataset_path: a folder of images, or of a dataset in one of the hub's layouts.
        image_size: short side in pixels.
        split: split of a hub dataset.
        cache_dir: folder for decoded images; by default the user's cache folder.
        skip_broken_images: skip images that cannot be decoded instead of raising.
        aspect_ratio: width:height.
        crop: part to keep: ``center``, ``random`` or ``none``. For random parts, images have a margin, and the
            space of a flow must know the shape of the parts: ``Pixels((3, image_size, image_size))``.
        alpha: keep transparency, as a fourth channel.
        fields: read the files of the folder as measurements, in their own type, instead of as uint8 pictures.
        channels_last: whether the last axis of the arrays is that of the channels; by default their shape decides.
        store_bits: most bits of a stored value of measurements.
        source: the source of the images, in place of the one that ``dataset`` or ``dataset_path`` names.

    Raises:
        UsageError: if a path is empty, the ratio does not suit the size, or the images cannot be found, read or stored.
    """
    arguments = {name: as_plain(value) for name, value in locals().items() if name != "source"}  # the only locals
    empty = "" in (dataset_path, cache_dir)  # an empty path would mean the current folder
    if empty:
        raise UsageError("--dataset_path or --cache_dir is empty: check whether a variable is unset")
    folder, cache = (None if path is None else Path(path) for path in (dataset_path, cache_dir))
    framing = Framing.of(image_size, aspect_ratio, alpha=alpha, crop=crop)
    if source is None:
        source = find_source(**arguments)
    how: dict[str, Any] = {"skip_broken_images": skip_broken_images, "store_bits": store_bits}
    store = open_store(source, framing, cache_dir=cache, **how)
    return ImageDataset(store, arguments)


def read_table(pictures: ImageDataset, source: ImageSource | None = None) -> Table:
    """Return the columns beside pictures, a row for each picture of the store.

    Args:
        pictures: the pictures, all of the store.
        source: their source; by default that of the arguments of :func:`open_dataset` that opened them.

    Raises:
        UsageError: if a metadata file is damaged, or the pictures have changed since they were decoded.
    """
    given, broken = pictures.arguments, {*pictures.info.skipped}
    if source is None:
        source = find_source(**given)
    table = source.read_table() if hasattr(source, "read_table") else Table({}, [""] * len(source))
    rows = [row for row in range(len(source)) if source.describe(row) not in broken]
    if len(rows) != len(pictures):
        found = f"{source.name} has {len(rows)} intact pictures, and had {len(pictures)} when they were decoded"
        raise UsageError(f"{found}: pass an empty --cache_dir to decode them again")
    for note in table.notes:
        PartialState().print(escaped(f"note: {note}"))
    return table.subset(rows)


def picture_names(pictures: ImageDataset) -> list[str]:
    """Return the path of each picture in its folder; for pictures of other sources the number of its row.

    Args:
        pictures: pictures, some or all of a store, with the arguments of :func:`open_dataset` that opened them.
    """
    names = [str(row) for row in range(pictures.info.length)]
    folder, broken = pictures.arguments.get("dataset_path"), {*pictures.info.skipped}
    if folder is not None and find_dataset_file(Path(folder)) is None:
        path = Path(folder).resolve()
        every = [file for file in find_files(path) if file.suffix.lower() in suffixes_of(pictures)]
        files = [file for file in every if printable(file) not in broken]
        if len(files) == len(names):  # else the folder has changed since its pictures were decoded
            names = [printable(file.relative_to(path)) for file in files]
    return names if pictures.rows is None else [names[row] for row in pictures.rows]


def suffixes_of(pictures: ImageDataset) -> frozenset[str]:
    """Return the suffixes of the files from which pictures, or measurements, were read."""
    return IMAGE_SUFFIXES if pictures.info.fields is None else FIELD_SUFFIXES


def data_arguments(document: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the arguments of :func:`open_dataset` that open a run's data again, or None if it records none.

    Args:
        document: the contents of the run's ``config.json``.
        path: the file, for the error message.

    Raises:
        UsageError: if the arguments are damaged.
    """
    data, kinds = document.get("data", {}), get_type_hints(open_dataset, include_extras=True)
    if "dataset" not in data:
        return None
    return {
        name: check_document({name: data[name]}, dict[str, kind], path)[name]  # type: ignore[valid-type]
        for name, kind in kinds.items()
        if name in data and name not in ("source", "return")
    }


def find_source(dataset: str, dataset_path: str | Path | None = None, **arguments: Any) -> ImageSource:
    """Return the source that arguments of :func:`open_dataset` name.

    Raises:
        UsageError: if it does not exist, or measurements are to be read from something else than a folder of files.
    """
    skip = arguments.get("skip_broken_images", False)
    if dataset_path is not None:
        folder = usable_path("--dataset_path", Path(dataset_path)).resolve()
        if not folder.is_dir():
            raise UsageError(f"--dataset_path {folder} is not a folder")
        if arguments.get("fields"):
            return FieldFolder(folder, channels_last=arguments.get("channels_last"), skip_unreadable=skip)
        is_table = find_dataset_file(folder) is not None
        split = arguments.get("split", "train")
        return HuggingFaceSource(folder, split) if is_table else ImageFolder(folder, skip_unreadable=skip)
    if arguments.get("fields"):
        raise UsageError("--space Fields reads a folder of files: pass it with --dataset_path")
    if dataset == SYNTHETIC_FLOWERS:
        ratio, crop = arguments.get("aspect_ratio", "1:1"), arguments.get("crop", "center")
        return SyntheticFlowers(2 * max(Framing.of(arguments["image_size"], ratio, crop=crop).stored_size))
    if os.path.isdir(dataset):
        raise UsageError(f"--dataset {dataset} is a folder: pass it as --dataset_path {dataset}")
    return HuggingFaceSource(dataset, arguments.get("split", "train"))
