"""Decode images once, into an image store.

The name of a store contains a hash of everything that determines its contents. A changed source, size or split
therefore gets a store of its own.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm.auto import tqdm

from rectified_flow.data.framing import Framing, StoreBits
from rectified_flow.data.resizing import fit_field
from rectified_flow.data.store import (
    IMAGES_FILE,
    FieldInfo,
    OriginalInfo,
    StoreWriter,
    dtype_of,
    row_size,
)
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import usable_path
from rectified_flow.system.machine import processors, require_disk
from rectified_flow.system.pictures import fit, upright_size
from rectified_flow.system.terminal import progress_bar

KIND = "image store"
STORE_VERSION = 3
REMEDY = "pass a writable folder with --cache_dir"


class ImageSource(Protocol):
    """A source of images that are to be decoded into a store.

    Optional: ``notes``, lines to print when it is decoded, and ``read_table()``, which returns the columns beside the
    images (:class:`rectified_flow.data.metadata.Table`). A source of measurements also has ``format``
    (:class:`rectified_flow.data.fields.FieldFormat`), and its images are arrays ``[c, h, w]``.
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

    def load(self, index: int) -> tuple[Any, int]:
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
    store_bits: StoreBits = 32,
) -> Path:
    """Return the folder of the store of ``source``. The store is built first if it does not exist or is damaged.

    One process builds while others wait for its lock.

    Args:
        source: source of the images.
        framing: form in which the images are stored; a number is the side of a square [px].
        cache_dir: folder of the stores; by default the user's cache folder.
        skip_broken_images: leave out images that cannot be decoded.
        store_bits: most bits of a stored value of measurements.

    Raises:
        UsageError: if an image is broken and ``skip_broken_images`` is off, if there are no images, or if the cache
            folder is not writable.
    """
    framing = Framing(framing, framing) if isinstance(framing, int) else framing
    row = row_of(source, framing, store_bits)
    shaped_by = (STORE_VERSION, source.fingerprint, *astuple(framing), skip_broken_images)
    if hasattr(source, "format"):
        shaped_by += (row, astuple(source.format))
    key = blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()
    slug = "".join(c if c.isalnum() else "-" for c in source.name).strip("-")[-40:]
    cache_dir = default_cache_dir() if cache_dir is None else usable_path("--cache_dir", cache_dir)
    path = cache_dir / f"{slug}-{framing.size_text}px-{key}"
    store = Artifact(path, KIND, ())
    if not store.is_whole:  # a whole store is read without a lock, even from a read-only cache
        with store.locked(REMEDY):
            if not store.is_whole:  # another process may have built it meanwhile
                _build(path, source, framing, row, skip_broken_images)
    return path


def row_of(source: ImageSource, framing: Framing, store_bits: StoreBits = 32) -> tuple[str, tuple[int, ...]]:
    """Return the file of a store's rows, and the shape of a row."""
    if not hasattr(source, "format"):
        return IMAGES_FILE, framing.stored_shape
    kind = stored_type(source.format.dtype, store_bits)
    return f"{Path(IMAGES_FILE).stem}.{kind}", (source.format.channels, *framing.stored_size[::-1])


def stored_type(dtype: str, store_bits: StoreBits) -> str:
    """Return the stored type: integers of up to 16 bits keep theirs, others become float16 or float32."""
    given = np.dtype(dtype)
    if given.kind in "iu" and given.itemsize <= 2:
        return dtype
    return "float16" if store_bits == 16 or dtype == "float16" else "float32"


Decoded = tuple[np.ndarray[Any, Any], int, tuple[int, int]]
"""The row of the store ``[c, h, w]``, the class or -1, and width and height before the image was resized [px]."""


def _build(
    path: Path, source: ImageSource, framing: Framing, row: tuple[str, tuple[int, ...]], skip_broken_images: bool
) -> None:
    """Decode all images into the store, and measure the originals on the way."""
    name, shape = row
    store = StoreWriter(path, len(source), {name: shape}, KIND)
    what, needed = f"{store.length} images of --image_size {framing.size_text}", row_size(name, shape)
    remedy = "lower --image_size, or pass a --cache_dir with more room"
    require_disk(store.length * needed, path.parent, what, remedy)
    labels, broken, values = list[int](), list[str](), ValueRange(shape[0])
    sizes, contents, enlarged = set[tuple[int, int]](), set[bytes](), 0
    with store.building():
        # Not through a memory map: on a full disk, a write to a memory map crashes the process.
        with (store.stage / name).open("wb") as file:
            for index, decoded in enumerate(_decode_all(source, framing, dtype_of(name), skip_broken_images)):
                if decoded is None:
                    broken.append(source.describe(index))
                    continue
                image, label, size = decoded
                pixels = image.tobytes()
                file.write(pixels)
                labels.append(label)
                sizes.add(size)
                contents.add(blake2b(pixels, digest_size=16).digest())
                enlarged += framing.enlarges(*size)
                if hasattr(source, "format"):
                    values.add(image)
        if not labels:
            raise UsageError(f"none of the {len(broken)} images in {source.name} could be read")
        for note in getattr(source, "notes", ()):
            tqdm.write(note)
        if broken:
            tqdm.write(f"skipped {len(broken)} broken images of {store.length}; the first is {broken[0]}")
        width, height = ([min(sides), max(sides)] for sides in zip(*sizes, strict=True))
        fields: dict[str, Any] = {}
        if hasattr(source, "format"):
            # The size of a pixel, a tag of the files, is no longer true if fields are resized.
            kept = source.format if sizes == {framing.stored_size} else replace(source.format, pixel_size=None)
            fields["fields"] = asdict(values.info(source.name, asdict(kept)))
        store.complete(
            np.asarray(labels, dtype=np.int64),
            source=source.name,
            image_size=min(framing.width, framing.height),
            class_names=source.class_names if min(labels) >= 0 else [],
            skipped=broken,
            framing=asdict(framing),
            originals=asdict(OriginalInfo(width, height, enlarged, duplicates=len(labels) - len(contents))),
            **fields,
        )


class ValueRange:
    """The least and greatest known value of each channel, and the number of unknown ones."""

    def __init__(self, channels: int) -> None:
        self.low, self.high, self.missing = np.full(channels, np.inf), np.full(channels, -np.inf), 0

    def add(self, image: np.ndarray[Any, Any]) -> None:
        """Add the values of an image ``[c, h, w]``."""
        flat = image.reshape(len(image), -1)
        unknown = np.isnan(flat)
        self.missing += int(unknown.sum())
        self.low = np.minimum(self.low, np.where(unknown, np.inf, flat).min(axis=1))
        self.high = np.maximum(self.high, np.where(unknown, -np.inf, flat).max(axis=1))

    def info(self, name: str, files: dict[str, Any]) -> FieldInfo:
        """Return the properties of all fields of a source.

        Args:
            name: the name of the source.
            files: the format of its files.

        Raises:
            UsageError: if a channel has no known values, or a single one.
        """
        for number, (least, most) in enumerate(zip(self.low, self.high, strict=True), 1):
            if not least < most:
                found = "no known value" if least > most else f"the value {least:g} everywhere"
                raise UsageError(f"channel {number} of {name} has {found}: remove the channel from the files")
        return FieldInfo(self.low.tolist(), self.high.tolist(), self.missing, files)


def _decode_all(
    source: ImageSource, framing: Framing, dtype: np.dtype[Any], skip_broken_images: bool
) -> Iterator[Decoded | None]:
    """Decode in order, one chunk at a time, with threads on all cores: the decoder releases the GIL."""

    def decode(index: int) -> Decoded | None:
        try:
            image, label = source.load(index)
            classes = len(source.class_names)
            if not -1 <= label < classes:
                raise UsageError(f"its label is {label}, outside the {classes} classes numbered from 0")
            if isinstance(image, np.ndarray):
                size = image.shape[2], image.shape[1]
                values = fit_field(image, framing.stored_size, pad=framing.crop == "none")
                return _narrowed(values, dtype), label, size
            size = upright_size(image)
            image = fit(image, framing.stored_size, alpha=framing.alpha, pad=framing.crop == "none")
            return np.asarray(image).transpose(2, 0, 1), label, size
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


def _narrowed(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return values in the type in which they are stored.

    Raises:
        ValueError: if a value becomes infinite.
    """
    with np.errstate(over="ignore"):
        stored = values.astype(dtype)
    if np.isinf(stored).any():
        raise ValueError(f"its values reach {np.nanmax(np.abs(values)):.3g}, too large for {dtype.name}")
    return stored
