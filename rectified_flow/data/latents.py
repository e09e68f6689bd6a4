"""The latents of a store's pictures, in a store of their own beside it."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.store import LATENTS_FILE, ImageDataset, LatentInfo, StoreDataset, StoreWriter, dtype_of
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.fill import fill_once
from rectified_flow.errors import DamageError, require
from rectified_flow.spaces.autoencoders import Autoencoder
from rectified_flow.spaces.latents import Latents

LATENTS_VERSION = 2
ROWS_AT_ONCE = 256


class LatentDataset(StoreDataset):
    """The latents of a store: items have ``latents``, float16 ``[v, k, c, h, w]``, as :class:`Latents` takes them.

    Args:
        path: the store's folder.
        recipe: the arguments of :func:`rectified_flow.open_dataset` that open the pictures.
        mirrored: read the mirror images too, if the store has them.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any] | None = None, *, mirrored: bool = True) -> None:
        super().__init__(path, recipe)
        self.mirrored = mirrored

    @property
    def encoded(self) -> LatentInfo:
        """What the latents are of."""
        if self.info.latents is None:
            raise DamageError(f"{self.path} holds no latents")
        return self.info.latents

    @property
    def content(self) -> str:
        """That of the pictures; the autoencoder is part of the flow."""
        return self.encoded.pictures

    @property
    def description(self) -> str:
        shape = " x ".join(map(str, self.info.shapes[LATENTS_FILE][2:]))
        return f"{super().description}, as latents of {shape} by {self.encoded.autoencoder}"

    def space(self, autoencoder: Autoencoder) -> Latents:
        """The space of these latents."""
        shape = self.info.shapes[LATENTS_FILE][2:]
        return Latents(autoencoder, self.info.image_size, shape, mean=self.encoded.mean, std=self.encoded.std)

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        if self.mirrored:
            return super().read_batch(indices)
        latents = self.entries["latents"][self._rows_of(indices), :1]  # read no more than that
        return {"latents": torch.from_numpy(latents), **self.condition_values(indices)}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "mirrored": self.mirrored}


def latents_path(pictures: ImageDataset, autoencoder: Autoencoder, *, mirrored: bool) -> Path:
    """The folder of the latents of ``pictures``, there or not."""
    shaped_by = (LATENTS_VERSION, pictures.fingerprint, autoencoder.fingerprint)
    key = blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()
    return pictures.path.with_name(f"{pictures.path.name}-latents-{key}{'-mirrored' * mirrored}")


def channel_scales(file: Path, length: int, shape: Sequence[int]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of ``length`` latents of a shape ``(v, k, c, h, w)``, 4 digits.

    Of the first variant alone: they are the same with mirror images and without.
    """
    rows = np.memmap(file, dtype_of(file.name), "r", shape=(length, *shape))
    sums = np.zeros((2, shape[2]))
    for start in range(0, length, ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE, 0].astype(np.float64)
        variance = some[:, 1:] ** 2  # of the latents' own distribution; none of a single point
        sums[0] += some[:, 0].sum(axis=(0, 2, 3))
        sums[1] += (some[:, 0] ** 2).sum(axis=(0, 2, 3)) + variance.sum(axis=(0, 1, 3, 4))
    mean, square = sums / (length * shape[3] * shape[4])
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return [float(f"{m:.4g}") for m in mean], [float(f"{s:.4g}") or 1.0 for s in std]


BATCH_SIZE = 16


def encode_pictures(
    pictures: ImageDataset, autoencoder: Autoencoder, state: PartialState, *, mirrored: bool
) -> LatentDataset:
    """The latents of pictures, encoded by all processes together unless they are there. Collective.

    Another run that encodes the same pictures is waited for. Encoding resumes after a kill.

    Args:
        pictures: a store's.
        autoencoder: the same on all processes.
        state: of the processes.
        mirrored: encode the mirror images, too.

    Raises:
        UsageError: if the pictures do not suit the autoencoder, or the store's folder cannot be written.
        RunError: if the disk is full.
    """
    encoding = _Encoding(pictures, autoencoder, state, mirrored)
    fill_once(encoding.writer, state, encoding.encode, encoding.finish, doing="encoding", batch_size=BATCH_SIZE)
    return LatentDataset(encoding.writer.path, pictures.recipe, mirrored=mirrored)


class _Encoding:
    """The way from one store to the other."""

    def __init__(self, pictures: ImageDataset, autoencoder: Autoencoder, state: PartialState, mirrored: bool) -> None:
        self.pictures, self.autoencoder, self.state = pictures, autoencoder, state
        self.space = Latents(autoencoder, pictures.info.image_size)
        with_mirrored = self._writer(mirrored=True)
        # The store with mirror images serves both, whichever run made it.
        self.mirrored = mirrored or on_main(state, lambda: with_mirrored.is_whole)
        self.writer = self._writer(mirrored=self.mirrored)

    @torch.no_grad()
    def encode(self, numbers: Sequence[int]) -> Mapping[str, Tensor]:
        """The rows of some pictures."""
        images = self.pictures.read_batch(numbers)["images"].to(self.state.device)
        variants = [images, images.flip(-1)][: 1 + self.mirrored]
        latents = torch.cat([self.space.from_pictures(each) for each in variants], dim=1).half()
        require(
            bool(latents.isfinite().all()),
            f"--autoencoder {self.autoencoder.name} gives latents of {self.pictures.info.source} that are not finite, "
            "or too large for float16: choose another autoencoder",
        )
        return {LATENTS_FILE: latents}

    def finish(self) -> None:
        """Measure the scales of the channels, and give the store its name."""
        writer, info = self.writer, self.pictures.info
        mean, std = channel_scales(writer.stage / LATENTS_FILE, writer.length, writer.rows[LATENTS_FILE])
        latents = {
            "autoencoder": self.autoencoder.name,
            "pictures": self.pictures.fingerprint,
            "mean": mean,
            "std": std,
        }
        more = {"source": info.source, "image_size": info.image_size, "class_names": info.class_names}
        writer.complete(np.asarray(self.pictures.labels), latents=latents, **more)

    def _writer(self, *, mirrored: bool) -> StoreWriter:
        path = latents_path(self.pictures, self.autoencoder, mirrored=mirrored)
        row = (1 + mirrored, *self.autoencoder.shape_of(self.pictures.info.image_size))
        return StoreWriter(path, len(self.pictures), {LATENTS_FILE: row}, "latents")
