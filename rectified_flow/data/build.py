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

import numpy as np
from tqdm.auto import tqdm

from rectified_flow.data.fill import REMEDY, StoreWriter, key_of
from rectified_flow.data.format import ORIGINALS_FILE, Original, OriginalInfo
from rectified_flow.data.framing import Framing
from rectified_flow.data.source import ImageSource, PictureRows, Row
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import usable_path
from rectified_flow.system.machine import processors
from rectified_flow.system.terminal import progress_bar

STORE_VERSION = 5


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
    key = key_of(STORE_VERSION, source.fingerprint, *astuple(framing), skip_broken_images, *rows.key, *sorted(exclude))
    slug = "".join(c if c.isalnum() else "-" for c in source.name).strip("-")[-40:]
    cache_dir = default_cache_dir() if cache_dir is None else usable_path("--cache_dir", cache_dir)
    path = cache_dir / f"{slug}-{framing.size_text}px-{key}"
    store = StoreWriter(path, len(source), "image store", documents=[ORIGINALS_FILE])
    with store.claimed(REMEDY) as is_missing:
        if is_missing:
            _build(store, source, source.numbers_without(exclude), rows, skip_broken_images)
    return path


def _build(
    store: StoreWriter, source: ImageSource, numbers: Sequence[int], rows: PictureRows, skip_broken_images: bool
) -> None:
    """Decode the images with some numbers into the store, and measure the originals on the way."""
    framing = rows.framing
    labels, broken, enlarged = list[int](), list[str](), 0
    originals, contents = list[Original](), set[bytes]()
    with store.building():
        decoder = _decode_all(source, numbers, rows, skip_broken_images)
        for index, decoded in zip(numbers, decoder, strict=True):
            if decoded is None:
                broken.append(source.describe(index))
                continue
            row, size, label = decoded
            if not labels:
                store.allocate({"images": row[None]})
            store.write(len(labels), {"images": row[None]}, durable=False)
            labels.append(label)
            originals.append(Original(source.name_of(index), *size))
            contents.add(blake2b(row.tobytes(), digest_size=16).digest())
            enlarged += framing.enlarges(*size)
            rows.add(row)
        if not labels:
            raise UsageError(f"none of the {len(broken)} images in {source.name} could be read")
        excluded = [f"left out {count} images by --exclude"] if (count := len(source) - len(numbers)) else []
        for note in (*source.notes, *excluded):
            tqdm.write(note)
        if broken:
            tqdm.write(f"skipped {len(broken)} broken images of {len(numbers)}; the first is {broken[0]}")
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
