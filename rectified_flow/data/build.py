"""Decode images once, into an image store.

The name of a store contains a hash of everything that determines its contents. A changed source, size or split
therefore gets a store of its own.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from rectified_flow.data.framing import Framing
from rectified_flow.data.metadata import Table
from rectified_flow.data.store import IMAGES_FILE, ORIGINALS_FILE, Original, OriginalInfo, StoreWriter, row_size
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import usable_path
from rectified_flow.system.machine import processors, require_disk
from rectified_flow.system.pictures import fit, upright_size
from rectified_flow.system.terminal import progress_bar

KIND = "image store"
STORE_VERSION = 5
REMEDY = "pass a writable folder with --cache_dir"
Row = np.ndarray[Any, np.dtype[Any]]


class PictureRows:
    """The rows of a store of pictures: uint8, RGB or RGBA. Other data have rows of their own with these members."""

    def __init__(self, framing: Framing) -> None:
        self.framing = framing
        self.file, self.shape = IMAGES_FILE, framing.stored_shape
        self.key: tuple[Any, ...] = ()

    def fit(self, image: Any) -> tuple[Row, tuple[int, int]]:
        """Return the row ``[c, h, w]`` of a Pillow image, and the width and height of the image [px]."""
        size, framing = upright_size(image), self.framing
        image = fit(image, framing.stored_size, alpha=framing.alpha, pad=framing.crop == "none")
        return np.asarray(image).transpose(2, 0, 1), size

    def add(self, row: Row) -> None:
        """Take note of a row that is written."""

    def info(self, name: str, sizes: set[tuple[int, int]]) -> dict[str, Any]:
        """Return further entries of ``info.json`` for the rows of a source with images of some sizes [px]."""
        return {}


class ImageSource:
    """A source of images that are to be decoded into a store."""

    name: str
    """Display name: a hub id or a path."""
    fingerprint: str
    """A string that changes whenever the images change."""
    class_names: Sequence[str] = ()
    """Class names by label; empty if the images have no labels."""
    notes: Sequence[str] = ()
    """Lines to print when the images are decoded."""

    def __len__(self) -> int:
        raise NotImplementedError

    def load(self, index: int) -> tuple[Any, int]:
        """Return an image, decoded or not, and its label (-1 for none). Any exception means a broken image."""
        raise NotImplementedError

    def describe(self, index: int) -> str:
        """Describe one image so that a user can find it."""
        return f"image {index} of {self.name}"

    def name_of(self, index: int) -> str:
        """Return the name of one image among those of the source."""
        return str(index)

    def size_of(self, index: int) -> tuple[int, int]:
        """Return the width and height of one image [px]."""
        return upright_size(self.load(index)[0])

    def numbers_without(self, exclude: Sequence[str]) -> list[int]:
        """Return the numbers of all images but those with the names to exclude.

        Raises:
            UsageError: if an image to exclude does not exist, or no other is left.
        """
        names = {self.name_of(index): index for index in range(len(self))} if exclude else {}
        unknown = sorted({*exclude} - names.keys())
        if unknown:
            raise UsageError(f"--exclude names {unknown[0]}, which is no image of {self.name}: correct the list")
        numbers = sorted({*range(len(self))} - {names[name] for name in exclude})
        if not numbers and exclude:
            raise UsageError(f"--exclude leaves no image of {self.name}: shorten the list")
        return numbers

    def read_table(self) -> Table:
        """Return the columns beside the images."""
        return Table({}, [""] * len(self))

    def rows(self, framing: Framing) -> PictureRows:
        """Return how the images become rows of a store."""
        return PictureRows(framing)


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
    exclude: Sequence[str] = (),
) -> Path:
    """Return the folder of the store of ``source``. The store is built first if it does not exist or is damaged.

    One process builds while others wait for its lock.

    Args:
        source: source of the images.
        framing: form in which the images are stored; a number is the side of a square [px].
        cache_dir: folder of the stores; by default the user's cache folder.
        skip_broken_images: leave out images that cannot be decoded.
        exclude: names of images to leave out.

    Raises:
        UsageError: if an image is broken and ``skip_broken_images`` is off, if there are no images, or if the cache
            folder is not writable.
    """
    framing = Framing(framing, framing) if isinstance(framing, int) else framing
    rows = source.rows(framing)
    shaped_by = (STORE_VERSION, source.fingerprint, *astuple(framing), skip_broken_images, *rows.key, *sorted(exclude))
    key = blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()
    slug = "".join(c if c.isalnum() else "-" for c in source.name).strip("-")[-40:]
    cache_dir = default_cache_dir() if cache_dir is None else usable_path("--cache_dir", cache_dir)
    path = cache_dir / f"{slug}-{framing.size_text}px-{key}"
    store = Artifact(path, KIND, ())
    if not store.is_whole:  # a whole store is read without a lock, even from a read-only cache
        with store.locked(REMEDY):
            if not store.is_whole:  # another process may have built it meanwhile
                _build(path, source, source.numbers_without(exclude), rows, skip_broken_images)
    return path


def _build(
    path: Path, source: ImageSource, numbers: Sequence[int], rows: PictureRows, skip_broken_images: bool
) -> None:
    """Decode the images with some numbers into the store, and measure the originals on the way."""
    framing = rows.framing
    store = StoreWriter(path, len(numbers), {rows.file: rows.shape}, KIND, documents=[ORIGINALS_FILE])
    what = f"{store.length} images of --image_size {framing.size_text}"
    remedy = "lower --image_size, or pass a --cache_dir with more room"
    require_disk(store.length * row_size(rows.file, rows.shape), path.parent, what, remedy)
    labels, broken, enlarged = list[int](), list[str](), 0
    originals, contents = list[Original](), set[bytes]()
    with store.building():
        # Not through a memory map: on a full disk, a write to a memory map crashes the process.
        with (store.stage / rows.file).open("wb") as file:
            decoder = _decode_all(source, numbers, rows, skip_broken_images)
            for index, decoded in zip(numbers, decoder, strict=True):
                if decoded is None:
                    broken.append(source.describe(index))
                    continue
                row, size, label = decoded
                pixels = row.tobytes()
                file.write(pixels)
                labels.append(label)
                originals.append(Original(source.name_of(index), *size))
                contents.add(blake2b(pixels, digest_size=16).digest())
                enlarged += framing.enlarges(*size)
                rows.add(row)
        if not labels:
            raise UsageError(f"none of the {len(broken)} images in {source.name} could be read")
        excluded = [f"left out {count} images by --exclude"] if (count := len(source) - len(numbers)) else []
        for note in (*source.notes, *excluded):
            tqdm.write(note)
        if broken:
            tqdm.write(f"skipped {len(broken)} broken images of {store.length}; the first is {broken[0]}")
        sizes = {original[1:] for original in originals}
        width, height = ([min(sides), max(sides)] for sides in zip(*sizes, strict=True))
        (store.stage / ORIGINALS_FILE).write_text(json.dumps(originals))
        store.complete(
            np.asarray(labels, dtype=np.int64),
            source=source.name,
            image_size=min(framing.width, framing.height),
            class_names=list(source.class_names) if min(labels) >= 0 else [],
            skipped=broken,
            framing=asdict(framing),
            originals=asdict(OriginalInfo(width, height, enlarged, duplicates=len(labels) - len(contents))),
            **rows.info(source.name, sizes),
        )


Decoded = tuple[Row, tuple[int, int], int]
"""The row of an image, its width and height before it was resized [px], and its class or -1."""


def _decode_all(
    source: ImageSource, numbers: Sequence[int], rows: PictureRows, skip_broken_images: bool
) -> Iterator[Decoded | None]:
    """Decode in order, one chunk at a time, with threads on all cores: the decoder releases the GIL."""

    def decode(index: int) -> Decoded | None:
        try:
            image, label = source.load(index)
            classes = len(source.class_names)
            if not -1 <= label < classes:
                raise UsageError(f"its label is {label}, outside the {classes} classes numbered from 0")
            return *rows.fit(image), label
        except Exception as error:  # decoders raise exceptions of many types
            if skip_broken_images:
                return None
            reason = getattr(error, "strerror", None) or first_line(error)
            remedy = "change its rights" if isinstance(error, PermissionError) else "remove it"
            broken = f"broken image {source.describe(index)} ({reason})"
            raise UsageError(f"{broken}: {remedy}, or pass --skip_broken_images") from error

    bar = progress_bar(total=len(numbers), desc=f"preparing {source.name}", unit="img")
    with bar, ThreadPoolExecutor(processors()) as pool:
        for start in range(0, len(numbers), 256):  # at most one chunk in flight
            for result in pool.map(decode, numbers[start : start + 256]):
                yield result
                bar.update()
