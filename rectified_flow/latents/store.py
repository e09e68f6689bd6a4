"""The latents of a store's pictures, in a store of their own beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.fill import StoreWriter, claimed, fill, key_of
from rectified_flow.data.format import LatentInfo, mapped
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError
from rectified_flow.latents.autoencoders import Autoencoder
from rectified_flow.latents.space import Latents

LATENTS_FILE = "latents.float16"
LATENTS_VERSION = 2
BATCH_SIZE = 16
ROWS_AT_ONCE = 256


class LatentDataset(StoreDataset):
    """The latents of a store: items have ``latents``, float16 ``[v, k, c, h, w]``, as :class:`Latents` takes them.

    Args:
        path: the store's folder.
        arguments: arguments of :func:`rectified_flow.open_dataset` that open the images.
        mirrored: read the mirror images too, if the store has them.
    """

    def __init__(self, path: Path, arguments: Mapping[str, Any] | None = None, *, mirrored: bool = True) -> None:
        super().__init__(path, arguments)
        self.mirrored = mirrored

    @property
    def encoded(self) -> LatentInfo:
        """The autoencoder and the scales of the latents."""
        return cast(LatentInfo, self.info.latents)

    @property
    def description(self) -> str:
        """The images and the shape of their latents in a line for a person."""
        shape = " x ".join(map(str, self.info.rows[LATENTS_FILE][2:]))
        return f"{super().description}, as latents of {shape} by {self.encoded.autoencoder}"

    def space_of(self, autoencoder: Autoencoder) -> Latents:
        """Return the space of these latents."""
        shape = self.info.rows[LATENTS_FILE][2:]
        return Latents(autoencoder, self.info.image_size, shape, mean=self.encoded.mean, std=self.encoded.std)

    @cached_property
    def entries(self) -> dict[str, np.ndarray[Any, Any]]:
        """All rows of the store by name of the entry; unless ``mirrored``, only the first variant of the latents."""
        entries = super().entries
        return entries if self.mirrored else {**entries, "latents": entries["latents"][:, :1]}


def channel_scales(file: Path, length: int, shape: Sequence[int]) -> tuple[list[float], list[float]]:
    """Measure mean and standard deviation of each channel of latents, to 4 digits.

    The file has ``length`` rows ``[v, k, c, h, w]``. The first variant alone counts, so that the scales are the same
    with mirror images and without.
    """
    rows = mapped(file, (length, *shape))
    sums = np.zeros((2, shape[2]))
    for start in range(0, length, ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE, 0].astype(np.float64)
        sums[0] += some[:, 0].sum(axis=(0, 2, 3))
        sums[1] += (some**2).sum(axis=(0, 1, 3, 4))  # squares of the mean and, unless deterministic, of the std
    mean, square = sums / (length * shape[3] * shape[4])
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return [float(f"{m:.4g}") for m in mean], [float(f"{s:.4g}") or 1.0 for s in std]


def encode_pictures(pictures: ImageDataset, autoencoder: Autoencoder, *, mirrored: bool) -> LatentDataset:
    """Encode images by all processes together, unless their latents are stored already. Collective.

    Another run that encodes the same images is waited for. Encoding resumes after a kill.

    Args:
        pictures: images of a store.
        autoencoder: autoencoder, the same on all processes.
        mirrored: encode the mirror images, too.

    Raises:
        UsageError: if the images do not suit the autoencoder, or the folder of the store cannot be written.
        RunError: if the disk is full.
    """
    info, state = pictures.info, PartialState()
    sides = (info.image_size,) if info.framing is None else info.framing.shape[1:]
    space = Latents(autoencoder, info.image_size, autoencoder.shape_of(*sides)[1:])
    # A store with mirror images can be used with and without mirroring.
    both = on_main(state, lambda: mirrored or _writer(pictures, autoencoder, mirrored=True).is_whole)
    writer = _writer(pictures, autoencoder, mirrored=both)

    @torch.no_grad()
    def make(numbers: Sequence[int]) -> Mapping[str, Tensor]:
        images = pictures.read_batch(numbers)["images"].to(state.device)
        variants = [images, images.flip(-1)][: 1 + both]
        latents = torch.cat([space.from_pictures(each) for each in variants], dim=1).half()
        found = f"--autoencoder {autoencoder.name} gives latents of {info.source} that are not finite"
        if not latents.isfinite().all():
            raise UsageError(f"{found}, or too large for float16: choose another autoencoder")
        return {"latents": latents}

    def describe() -> dict[str, Any]:
        mean, std = channel_scales(writer.stage / LATENTS_FILE, writer.length, writer.shapes[LATENTS_FILE])
        latents = LatentInfo(autoencoder.name, pictures.fingerprint, mean, std)
        more = {"source": info.source, "image_size": info.image_size, "class_names": info.class_names}
        return {"labels": pictures.labels, "latents": asdict(latents), **more}

    with claimed(writer) as is_missing:
        if is_missing:
            fill(writer, make, describe, batch_size=BATCH_SIZE)
    return LatentDataset(writer.path, pictures.arguments, mirrored=mirrored)


def _writer(pictures: ImageDataset, autoencoder: Autoencoder, *, mirrored: bool) -> StoreWriter:
    key = key_of(LATENTS_VERSION, pictures.fingerprint, autoencoder.fingerprint)
    path = pictures.path.with_name(f"{pictures.path.name}-latents-{key}{'-mirrored' * mirrored}")
    return StoreWriter(path, len(pictures), "latents")
