"""Encode pictures once, on all processes together, into a store that later runs read."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.latent_store import LatentDataset, channel_scales, latents_path
from rectified_flow.data.store import LATENTS_FILE, ImageDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.filling import fill_once
from rectified_flow.errors import require
from rectified_flow.spaces.autoencoder import Autoencoder
from rectified_flow.spaces.latents import Latents

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
        writer.finish(np.asarray(self.pictures.labels), latents=latents, **more)

    def _writer(self, *, mirrored: bool) -> StoreWriter:
        path = latents_path(self.pictures, self.autoencoder, mirrored=mirrored)
        row = (1 + mirrored, *self.autoencoder.shape_of(self.pictures.info.image_size))
        return StoreWriter(path, len(self.pictures), {LATENTS_FILE: row}, "latents")
