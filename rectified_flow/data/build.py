"""Decode images once, into an image store.

The name of a store contains a hash of everything that determines its contents. A changed source, size or split
therefore gets a store of its own.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from rectified_flow.data.fitting import fit, upright_size
from rectified_flow.data.framing import Crop, Framing
from rectified_flow.data.huggingface import HuggingFaceSource, find_dataset_file
from rectified_flow.data.image_folder import ImageFolder
from rectified_flow.data.store import IMAGES_FILE, INFO_FILE, LABELS_FILE, ImageDataset, describe_files, find_damage
from rectified_flow.data.synthetic_flowers import SYNTHETIC_FLOWERS, SyntheticFlowers
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import flush_folder, lock_of, remove, usable_path, write_document
from rectified_flow.system.machine import processors, require_disk
from rectified_flow.system.terminal import progress_bar

STORE_VERSION = 2


class ImageSource(Protocol):
    """A source of images that are to be decoded into a store.

    Optional: ``notes``, lines to print when it is decoded.
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
    """The default folder of stores: ``$RECTIFIED_FLOW_CACHE``, else the user's cache folder.

    Raises:
        UsageError: if there can be no such folder: the user may have no home.
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
    """Return the folder of the store for ``source``, building the store if it does not exist.

    One process builds while others wait for its lock. A store gets its final name only when it is complete, so a build
    that was killed is repeated, and an incomplete store is never read. A damaged store is rebuilt.

    Args:
        source: of the pictures.
        framing: the form in which they are stored; a number is the side of a square [px].
        cache_dir: where the stores are.
        skip_broken_images: leave out pictures that cannot be decoded.

    Raises:
        UsageError: if an image is broken and ``skip_broken_images`` is off, if there are no images, or if the cache
            folder is not writable.
    """
    framing = Framing(framing, framing) if isinstance(framing, int) else framing
    key = _key(source, framing, skip_broken_images)
    cache_dir = default_cache_dir() if cache_dir is None else usable_path("--cache_dir", cache_dir)
    path = cache_dir / f"{_slug(source.name)}-{framing.size_text}px-{key}"
    try:
        if path.exists() and find_damage(path) is None:
            return path
        cache_dir.mkdir(parents=True, exist_ok=True)
        with lock_of(Path(f"{path}.lock")):
            damage = find_damage(path) if path.exists() else None
            if damage is not None:
                tqdm.write(f"warning: the image store {path} was changed ({damage}); rebuilding it")
                remove(path)
            if not path.exists():
                _Build(source, framing, skip_broken_images).into(path)
        return path
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the image store {path} cannot be read and written ({reason}): pass a writable folder with --cache_dir"
        ) from error


@dataclass(frozen=True)
class _Decoded:
    """A picture.

    Args:
        pixels: its row of the store.
        label: its class, or -1.
        size: width and height before it was fitted [px].
    """

    pixels: bytes
    label: int
    size: tuple[int, int]


class _Tally:
    """Counts what :class:`OriginalInfo` records of the pictures."""

    def __init__(self, framing: Framing) -> None:
        self._framing = framing
        self._sizes, self._contents = set[tuple[int, int]](), set[bytes]()
        self._enlarged = self._duplicates = 0

    def add(self, picture: _Decoded) -> None:
        content = blake2b(picture.pixels, digest_size=16).digest()
        self._duplicates += content in self._contents
        self._contents.add(content)
        self._enlarged += self._framing.enlarges(*picture.size)
        self._sizes.add(picture.size)

    @property
    def info(self) -> dict[str, Any]:
        widths, heights = zip(*self._sizes, strict=True)
        return {
            "width": [min(widths), max(widths)],
            "height": [min(heights), max(heights)],
            "enlarged": self._enlarged,
            "duplicates": self._duplicates,
        }


@dataclass(frozen=True)
class _Build:
    source: ImageSource
    framing: Framing
    skip_broken_images: bool

    def into(self, path: Path) -> None:
        if len(self.source) == 0:
            raise UsageError(f"{self.source.name} holds no images")
        pixels = len(self.source) * prod(self.framing.stored_shape)
        what = f"{len(self.source)} images of --image_size {self.framing.size_text}"
        require_disk(pixels, path.parent, what, "lower --image_size, or pass a --cache_dir with more room")
        stage = path.with_name(f"{path.name}.building")
        remove(stage)  # left by a killed build: we hold the lock
        stage.mkdir()
        try:
            self._write(stage)
            flush_folder(stage)
            stage.rename(path)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise

    def _write(self, stage: Path) -> None:
        class_names = self.source.class_names
        labels: list[int] = []
        broken: list[str] = []
        tally = _Tally(self.framing)
        content = blake2b(digest_size=16)
        # Not through a memory map: on a full disk, a write to a memory map crashes the process.
        with (stage / IMAGES_FILE).open("wb") as file:
            for index, decoded in enumerate(self._decoded()):
                if decoded is None:
                    broken.append(self.source.describe(index))
                    continue
                file.write(decoded.pixels)
                content.update(decoded.pixels)
                tally.add(decoded)
                labels.append(decoded.label)
        if not labels:
            raise UsageError(f"none of the {len(broken)} images in {self.source.name} could be read")
        for note in getattr(self.source, "notes", ()):
            tqdm.write(note)
        if broken:
            tqdm.write(f"skipped {len(broken)} broken images of {len(self.source)}; the first is {broken[0]}")
        np.save(stage / LABELS_FILE, np.asarray(labels, dtype=np.int64))
        content.update(repr(labels).encode())
        info = {
            "content": content.hexdigest(),
            "source": self.source.name,
            "length": len(labels),
            "image_size": min(self.framing.shape[1:]),
            "class_names": class_names if min(labels) >= 0 else [],
            "skipped": broken,
            "files": describe_files(stage, IMAGES_FILE, LABELS_FILE),
            "originals": tally.info,
        }
        if not self.framing.is_default:
            info |= {"rows": {IMAGES_FILE: self.framing.stored_shape}, "framing": asdict(self.framing)}
        write_document(stage / INFO_FILE, info)

    def _decoded(self) -> Iterator["_Decoded | None"]:
        """Decode in order, one chunk at a time, with threads on all cores: the decoder releases the GIL."""
        progress = progress_bar(total=len(self.source), desc=f"preparing {self.source.name}", unit="img")
        with progress, ThreadPoolExecutor(processors()) as pool:
            for start in range(0, len(self.source), 256):  # at most one chunk in flight
                chunk = range(start, min(start + 256, len(self.source)))
                for result in pool.map(self._decode, chunk):
                    yield result
                    progress.update()

    def _decode(self, index: int) -> "_Decoded | None":
        try:
            image, label = self.source.load(index)
            classes = len(self.source.class_names)
            if not -1 <= label < classes:
                raise ValueError(f"its label is {label}, and the {classes} classes are numbered from 0")
            size = upright_size(image)
            return _Decoded(np.asarray(fit(image, self.framing)).transpose(2, 0, 1).tobytes(), label, size)
        except Exception as error:  # decoders raise exceptions of many types
            if self.skip_broken_images:
                return None
            reason = getattr(error, "strerror", None) or first_line(error)
            remedy = "change its rights" if isinstance(error, PermissionError) else "remove it"
            raise UsageError(
                f"broken image {self.source.describe(index)} ({reason}): {remedy}, or pass --skip_broken_images"
            ) from error


def _key(source: ImageSource, framing: Framing, skip_broken_images: bool) -> str:
    shaped_by: tuple[object, ...] = (STORE_VERSION, source.fingerprint, framing.width, skip_broken_images)
    if not framing.is_default:  # else the name is that of earlier versions
        shaped_by += astuple(framing)
    return blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")[-40:]


def open_dataset(
    dataset: str,
    dataset_path: str | Path | None = None,
    *,
    image_size: int,
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
        crop: the part that is kept: ``center``, ``random`` or ``none``. For random parts, images have a margin, and the
            space of a flow must know the shape of the parts: ``Pixels((3, image_size, image_size))``.
        alpha: keep transparency, as a fourth channel.
        source: the source of the images, in place of the one that ``dataset`` or ``dataset_path`` names.

    Raises:
        UsageError: if a path is empty, the ratio does not suit the size, or the images cannot be found, read or stored.
    """
    if "" in (dataset_path, cache_dir):  # which would mean the current folder
        raise UsageError("--dataset_path or --cache_dir is empty: is a variable not set?")
    dataset_path, cache_dir = (None if path is None else Path(path) for path in (dataset_path, cache_dir))
    framing = Framing.of(image_size, aspect_ratio, alpha=alpha, crop=crop)
    source = source or _find_source(dataset, dataset_path, max(framing.stored_size), split, skip_broken_images)
    recipe = {
        "dataset": dataset,
        "dataset_path": None if dataset_path is None else str(dataset_path),
        "image_size": image_size,
        "split": split,
        "cache_dir": None if cache_dir is None else str(cache_dir),
        "skip_broken_images": skip_broken_images,
        "aspect_ratio": aspect_ratio,
        "crop": crop,
        "alpha": alpha,
    }
    store = open_store(source, framing, cache_dir=cache_dir, skip_broken_images=skip_broken_images)
    return ImageDataset(store, recipe)


def _find_source(dataset: str, folder: Path | None, side: int, split: str, skip: bool) -> ImageSource:
    if folder is not None:
        folder = usable_path("--dataset_path", folder).resolve()
        if not folder.is_dir():
            raise UsageError(f"--dataset_path {folder} is not a folder")
        if find_dataset_file(folder) is not None:
            return HuggingFaceSource(folder, split)
        return ImageFolder(folder, skip_unreadable=skip)
    if dataset == SYNTHETIC_FLOWERS:
        return SyntheticFlowers(2 * side)
    if os.path.isdir(dataset):
        raise UsageError(f"--dataset {dataset} is a folder: pass it as --dataset_path {dataset}")
    return HuggingFaceSource(dataset, split)
