"""The files of a store: a memory map for each entry of its items, their labels, and ``info.json``.

A store is an artifact: a file ``NAME.DTYPE`` ``[n, ...]`` for each entry of its items, such as ``images.uint8``,
``labels.npy`` ``[n]`` (-1 without labels), ``info.json``, and the manifest by which a later change is noticed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import Field

from rectified_flow.data.framing import Framing
from rectified_flow.system.terminal import size_text

IMAGES_FILE = "images.uint8"
LABELS_FILE, INFO_FILE, RECIPE_FILE, ORIGINALS_FILE = "labels.npy", "info.json", "recipe.json", "originals.json"
Positive = Annotated[int, Field(gt=0, lt=2**53)]


@dataclass(frozen=True)
class LatentInfo:
    """The autoencoder and the scales of the latents of a store."""

    autoencoder: str
    """Name of the autoencoder, for display."""
    pictures: str
    """Fingerprint of the encoded images."""
    mean: list[float]
    """Mean of each channel over all images."""
    std: list[float]
    """Standard deviation of each channel over all images."""


class Original(NamedTuple):
    """The picture that a row of a store was made from."""

    name: str
    width: Positive
    """Width before it was resized [px]."""
    height: Positive
    """Height before it was resized [px]."""


@dataclass(frozen=True)
class OriginalInfo:
    """Properties of the images of a store before they were resized."""

    width: list[Positive]
    """Smallest and largest width [px]."""
    height: list[Positive]
    """Smallest and largest height [px]."""
    enlarged: int
    """Number of images that have fewer pixels than they are stored with."""
    duplicates: int
    """Number of images whose stored pixels equal those of an earlier one."""


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
    latents: LatentInfo | None = None
    framing: Framing | None = None
    """Form of the images; None for other rows than images."""
    originals: OriginalInfo | None = None
    space: dict[str, Any] | None = None
    """Description of the space of the stored rows; None for pictures."""

    @property
    def size_text(self) -> str:
        """Sides of the images: ``64``, or ``96x64``."""
        if self.framing is not None:
            return self.framing.size_text
        _, height, width = self.rows.get(IMAGES_FILE, (3, self.image_size, self.image_size))
        return size_text(width, height)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the type of the values in a store's file ``NAME.DTYPE``."""
    return np.dtype(Path(name).suffix[1:])


def mapped(file: Path, shape: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
    """Return the array in ``file``, of that shape unless it is ``.npy``, as a memory map not to be written to."""

    def in_mode(mode: Literal["r", "c"]) -> np.ndarray[Any, Any]:
        if file.suffix == ".npy":
            return cast(np.ndarray[Any, Any], np.load(file, mmap_mode=mode))
        return np.memmap(file, dtype_of(file.name), mode, shape=shape)

    try:
        return in_mode("r")
    except OSError:  # some network file systems refuse a shared map
        return in_mode("c")
