"""Decode pictures once, into an image store.

A store's name is a hash of everything that shapes it, so a changed source, size or split is another store.
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from rectified_flow.data.image_store import IMAGES_FILE, INFO_FILE, LABELS_FILE, describe_files, find_damage
from rectified_flow.errors import UsageError, first_line
from rectified_flow.files import flush_folder, lock_of
from rectified_flow.progress import progress_bar

STORE_VERSION = 2


class ImageSource(Protocol):
    """Where pictures come from before they are in a store."""

    name: str
    """What a person calls it: a hub id or a path."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the pictures do."""

    @property
    def class_names(self) -> list[str]:
        """Names by label; empty if the pictures have no labels."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[Image.Image, int]:
        """Return picture and label (-1 for none), decoded or not yet; any exception means the picture is broken."""

    def describe(self, index: int) -> str:
        """Name one picture so that a person finds it."""


def default_cache_dir() -> Path:
    """Where stores go unless told otherwise: ``$RECTIFIED_FLOW_CACHE``, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("RECTIFIED_FLOW_CACHE", f"{base}/rectified-flow")).expanduser()


def open_store(
    source: ImageSource,
    image_size: int,
    *,
    cache_dir: Path | None = None,
    skip_broken_images: bool = False,
) -> Path:
    """Return the folder of the store for ``source`` at ``image_size`` px, building it if it is not there.

    One process builds while others wait for its lock. A store appears under its name only when it is whole, so a
    build that was killed is done again and a half-built one is never read. A damaged one is built anew.

    Raises:
        UsageError: if a picture is broken and not to be skipped, there is none, or the cache folder cannot be written.
    """
    key = _key(source, image_size, skip_broken_images)
    cache_dir = cache_dir or default_cache_dir()
    path = cache_dir / f"{_slug(source.name)}-{image_size}px-{key}"
    if path.exists() and find_damage(path) is None:
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with lock_of(Path(f"{path}.lock")):
            damage = find_damage(path) if path.exists() else None
            if damage is not None:
                tqdm.write(f"warning: the image store {path} was changed ({damage}): building it again")
                shutil.rmtree(path)
            if not path.exists():
                _Build(source, image_size, skip_broken_images).into(path)
        return path
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write the image store {path}: {reason}; name a folder with --cache_dir") from error


@dataclass(frozen=True)
class _Build:
    source: ImageSource
    image_size: int
    skip_broken_images: bool

    def into(self, path: Path) -> None:
        if len(self.source) == 0:
            raise UsageError(f"{self.source.name} holds no images")
        stage = path.with_name(f"{path.name}.building")
        shutil.rmtree(stage, ignore_errors=True)  # left by a build that was killed: we hold the lock
        stage.mkdir()
        try:
            self._write(stage)
            flush_folder(stage)
            stage.rename(path)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise

    def _write(self, stage: Path) -> None:
        labels: list[int] = []
        broken: list[str] = []
        content = blake2b(digest_size=16)
        # Not through a map, which a full disk would turn into a crash.
        with (stage / IMAGES_FILE).open("wb") as file:
            for index, (pixels, label) in enumerate(self._decoded()):
                if pixels is None:
                    broken.append(self.source.describe(index))
                    continue
                file.write(pixels)
                content.update(pixels)
                labels.append(label)
        if not labels:
            raise UsageError(f"none of the {len(broken)} images in {self.source.name} could be read")
        if broken:
            tqdm.write(f"skipped {len(broken)} broken images of {len(self.source)}, the first one {broken[0]}")
        np.save(stage / LABELS_FILE, np.asarray(labels, dtype=np.int64))
        content.update(repr(labels).encode())
        info = {
            "content": content.hexdigest(),
            "source": self.source.name,
            "length": len(labels),
            "image_size": self.image_size,
            "class_names": self.source.class_names if min(labels) >= 0 else [],
            "skipped": broken,
            "files": describe_files(stage, IMAGES_FILE, LABELS_FILE),
        }
        (stage / INFO_FILE).write_text(json.dumps(info, indent=1))

    def _decoded(self) -> Iterator[tuple[bytes | None, int]]:
        """Decode in order, a chunk at a time, on all cores: the decoder releases the interpreter's lock."""
        progress = progress_bar(total=len(self.source), desc=f"preparing {self.source.name}", unit="img")
        with progress, ThreadPoolExecutor() as pool:
            for start in range(0, len(self.source), 256):  # no more in flight than a chunk
                chunk = range(start, min(start + 256, len(self.source)))
                for result in pool.map(self._decode, chunk):
                    yield result
                    progress.update()

    def _decode(self, index: int) -> tuple[bytes | None, int]:
        try:
            image, label = self.source.load(index)
            return np.asarray(fit(image, self.image_size)).transpose(2, 0, 1).tobytes(), label
        except Exception as error:  # every decoder fails in its own way
            if self.skip_broken_images:
                return None, -1
            raise UsageError(
                f"broken image {self.source.describe(index)} ({first_line(error)}): "
                "remove it, or pass --skip_broken_images"
            ) from error


def fit(image: Image.Image, size: int) -> Image.Image:
    """Upright RGB ``image``, resized by its short side, centre-cropped to ``size`` px; transparency becomes white."""
    image.draft("RGB", (2 * size, 2 * size))  # lets JPEG decode at a fraction of its size; others ignore it
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS)


def _key(source: ImageSource, image_size: int, skip_broken_images: bool) -> str:
    shaped_by = (STORE_VERSION, source.fingerprint, image_size, skip_broken_images)
    return blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")[-40:]
