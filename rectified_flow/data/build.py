"""Decode images once, into an image store.

The name of a store contains a hash of everything that determines its contents. A changed source, size or split
therefore gets a store of its own.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import numpy as np
from accelerate import PartialState
from PIL import Image
from tqdm.auto import tqdm

from rectified_flow.data.framing import Crop, Framing
from rectified_flow.data.metadata import Table
from rectified_flow.data.sources.huggingface import HuggingFaceSource, find_dataset_file
from rectified_flow.data.sources.image_folder import ImageFolder, find_images
from rectified_flow.data.sources.synthetic_flowers import SYNTHETIC_FLOWERS, SyntheticFlowers
from rectified_flow.data.store import IMAGES_FILE, ImageDataset, OriginalInfo, StoreWriter
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flags import Positive, as_plain
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import check_document, printable, usable_path
from rectified_flow.system.machine import processors, require_disk
from rectified_flow.system.pictures import fit, upright_size
from rectified_flow.system.terminal import progress_bar

KIND = "image store"
STORE_VERSION = 3
REMEDY = "pass a writable folder with --cache_dir"


class ImageSource(Protocol):
    """A source of images that are to be decoded into a store.

    Optional: ``notes``, lines to print when it is decoded, and ``read_table()``, which returns the columns beside the
    images (:class:`rectified_flow.data.metadata.Table`).
    """

    name: str
    """Display name: a hub id or a path."""

    @property
    def fingerprint(self) -> str:
        """A string that changes whenever the images change."""

    @property
    def class_names(self) -> list[str]:
        """Class names by label; empty if the images have no labels."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[Image.Image, int]:
        """Return an image, decoded or not, and its label (-1 for none). Any exception means a broken image."""

    def describe(self, index: int) -> str:
        """Describe one image so that a user can find it."""


def default_cache_dir() -> Path:
    """Return the default folder of stores: ``$RECTIFIED_FLOW_CACHE``, else the user's cache folder.

    Raises:
        UsageError: if the default folder cannot exist, for example because the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    path = Path(os.environ.get("RECTIFIED_FLOW_CACHE", f"{base}/rectified-flow"))
    return usable_path("the default --cache_dir", path)


def open_store(
    source: ImageSource,
    framing: Framing | int,
    *,
    cache_dir: Path | None = None,
    skip_broken_images: bool = False,
) -> Path:
    """Return the folder of the store of ``source``. The store is built first if it does not exist or is damaged.

    One process builds while others wait for its lock.

    Args:
        source: source of the images.
        framing: form in which the images are stored; a number is the side of a square [px].
        cache_dir: folder of the stores; by default the user's cache folder.
        skip_broken_images: leave out images that cannot be decoded.

    Raises:
        UsageError: if an image is broken and ``skip_broken_images`` is off, if there are no images, or if the cache
            folder is not writable.
    """
    framing = Framing(framing, framing) if isinstance(framing, int) else framing
    shaped_by = (STORE_VERSION, source.fingerprint, *astuple(framing), skip_broken_images)
    key = blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()
    slug = "".join(c if c.isalnum() else "-" for c in source.name).strip("-")[-40:]
    cache_dir = default_cache_dir() if cache_dir is None else usable_path("--cache_dir", cache_dir)
    path = cache_dir / f"{slug}-{framing.size_text}px-{key}"
    store = Artifact(path, KIND, ())
    if not store.is_whole:  # a whole store is read without a lock, even from a read-only cache
        with store.locked(REMEDY):
            if not store.is_whole:  # another process may have built it meanwhile
                _build(path, source, framing, skip_broken_images)
    return path


Decoded = tuple[bytes, int, tuple[int, int]]
"""The row of the store, the class or -1, and width and height before the image was resized [px]."""


def _build(path: Path, source: ImageSource, framing: Framing, skip_broken_images: bool) -> None:
    """Decode all images into the store, and measure the originals on the way."""
    store = StoreWriter(path, len(source), {IMAGES_FILE: framing.stored_shape}, KIND)
    what, needed = f"{store.length} images of --image_size {framing.size_text}", prod(framing.stored_shape)
    remedy = "lower --image_size, or pass a --cache_dir with more room"
    require_disk(store.length * needed, path.parent, what, remedy)
    labels, broken = list[int](), list[str]()
    sizes, contents, enlarged = set[tuple[int, int]](), set[bytes](), 0
    with store.building():
        # Not through a memory map: on a full disk, a write to a memory map crashes the process.
        with (store.stage / IMAGES_FILE).open("wb") as file:
            for index, decoded in enumerate(_decode_all(source, framing, skip_broken_images)):
                if decoded is None:
                    broken.append(source.describe(index))
                    continue
                pixels, label, size = decoded
                file.write(pixels)
                labels.append(label)
                sizes.add(size)
                contents.add(blake2b(pixels, digest_size=16).digest())
                enlarged += framing.enlarges(*size)
        if not labels:
            raise UsageError(f"none of the {len(broken)} images in {source.name} could be read")
        for note in getattr(source, "notes", ()):
            tqdm.write(note)
        if broken:
            tqdm.write(f"skipped {len(broken)} broken images of {store.length}; the first is {broken[0]}")
        width, height = ([min(sides), max(sides)] for sides in zip(*sizes, strict=True))
        store.complete(
            np.asarray(labels, dtype=np.int64),
            source=source.name,
            image_size=min(framing.width, framing.height),
            class_names=source.class_names if min(labels) >= 0 else [],
            skipped=broken,
            framing=asdict(framing),
            originals=asdict(OriginalInfo(width, height, enlarged, duplicates=len(labels) - len(contents))),
        )


def _decode_all(source: ImageSource, framing: Framing, skip_broken_images: bool) -> Iterator[Decoded | None]:
    """Decode in order, one chunk at a time, with threads on all cores: the decoder releases the GIL."""

    def decode(index: int) -> Decoded | None:
        try:
            image, label = source.load(index)
            classes = len(source.class_names)
            if not -1 <= label < classes:
                raise UsageError(f"its label is {label}, outside the {classes} classes numbered from 0")
            size = upright_size(image)
            image = fit(image, framing.stored_size, alpha=framing.alpha, pad=framing.crop == "none")
            return np.asarray(image).transpose(2, 0, 1).tobytes(), label, size
        except Exception as error:  # decoders raise exceptions of many types
            if skip_broken_images:
                return None
            reason = getattr(error, "strerror", None) or first_line(error)
            remedy = "change its rights" if isinstance(error, PermissionError) else "remove it"
            broken = f"broken image {source.describe(index)} ({reason})"
            raise UsageError(f"{broken}: {remedy}, or pass --skip_broken_images") from error

    bar = progress_bar(total=len(source), desc=f"preparing {source.name}", unit="img")
    with bar, ThreadPoolExecutor(processors()) as pool:
        for start in range(0, len(source), 256):  # at most one chunk in flight
            for result in pool.map(decode, range(start, min(start + 256, len(source)))):
                yield result
                bar.update()


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
    source: ImageSource | None = None,
) -> ImageDataset:
    """Open a dataset as uint8 images of ``image_size`` px, decoding the images first if they are not in a store yet.

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
        source = _find_source(dataset, folder, max(framing.stored_size), split, skip_broken_images)
    store = open_store(source, framing, cache_dir=cache, skip_broken_images=skip_broken_images)
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
        folder = None if given.get("dataset_path") is None else Path(given["dataset_path"])
        skip = given.get("skip_broken_images", False)
        source = _find_source(given["dataset"], folder, max(_framing_of(given)), given.get("split", "train"), skip)
    table = source.read_table() if hasattr(source, "read_table") else Table({}, [""] * len(source))
    rows = [row for row in range(len(source)) if source.describe(row) not in broken]
    if len(rows) != len(pictures):
        found = f"{source.name} has {len(rows)} intact pictures, and had {len(pictures)} when they were decoded"
        raise UsageError(f"{found}: pass an empty --cache_dir to decode them again")
    for note in table.notes:
        PartialState().print(f"note: {note}")
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
        files = [file for file in find_images(path) if printable(file) not in broken]
        if len(files) == len(names):  # else the folder has changed since its pictures were decoded
            names = [printable(file.relative_to(path)) for file in files]
    return names if pictures.rows is None else [names[row] for row in pictures.rows]


def _framing_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sides of the stored pictures that arguments of :func:`open_dataset` ask for [px]."""
    ratio, crop = arguments.get("aspect_ratio", "1:1"), arguments.get("crop", "center")
    return Framing.of(arguments["image_size"], ratio, alpha=arguments.get("alpha", False), crop=crop).stored_size


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


def _find_source(dataset: str, folder: Path | None, side: int, split: str, skip: bool) -> ImageSource:
    if folder is not None:
        folder = usable_path("--dataset_path", folder).resolve()
        if not folder.is_dir():
            raise UsageError(f"--dataset_path {folder} is not a folder")
        is_table = find_dataset_file(folder) is not None
        return HuggingFaceSource(folder, split) if is_table else ImageFolder(folder, skip_unreadable=skip)
    if dataset == SYNTHETIC_FLOWERS:
        return SyntheticFlowers(2 * side)
    if os.path.isdir(dataset):
        raise UsageError(f"--dataset {dataset} is a folder: pass it as --dataset_path {dataset}")
    return HuggingFaceSource(dataset, split)
