"""Encode pictures once, on all processes together, into a store that later runs read."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from filelock import Timeout
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.latent_store import LatentDataset, channel_scales, latents_path
from rectified_flow.data.store import LATENTS_FILE, ImageDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.filling import fill, no_room
from rectified_flow.errors import UsageError, require
from rectified_flow.files import lock_of
from rectified_flow.spaces.autoencoder import Autoencoder
from rectified_flow.spaces.latents import Latents

BATCH_SIZE = 16
LOCK_TIMEOUT = 10.0
"""Seconds between two signs of life of processes that wait for another run."""


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
    with ExitStack() as held:
        found = on_main(state, lambda: encoding.find_or_lock(held, wait=0))
        if found == BUSY and state.is_main_process:
            tqdm.write("waiting for another run that encodes these pictures")
        while found == BUSY:
            found = on_main(state, lambda: encoding.find_or_lock(held, wait=LOCK_TIMEOUT))
        if isinstance(found, int):
            encoding.encode(found)
            found = on_main(state, encoding.finish)
    assert isinstance(found, Path)
    return LatentDataset(found, pictures.recipe, mirrored=mirrored)


BUSY = "busy"


class _Encoding:
    """The way from one store to the other."""

    def __init__(self, pictures: ImageDataset, autoencoder: Autoencoder, state: PartialState, mirrored: bool) -> None:
        self.pictures, self.autoencoder, self.state, self.mirrored = pictures, autoencoder, state, mirrored
        self.space = Latents(autoencoder, pictures.info.image_size)

    def find_or_lock(self, held: ExitStack, wait: float) -> Path | int | str:
        """The whole store; or the number of rows written, other runs being locked out; or BUSY if they lock us out."""
        wanted = latents_path(self.pictures, self.autoencoder, mirrored=self.mirrored)
        both = latents_path(self.pictures, self.autoencoder, mirrored=True)
        try:
            for path in (both, wanted):
                if self._writer(path).is_whole:
                    return path
            held.enter_context(lock_of(Path(f"{wanted}.lock")).acquire(timeout=wait))
            return wanted if self._writer(wanted).is_whole else self._writer(wanted).begin({})
        except Timeout:
            return BUSY
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"the latents {wanted} cannot be written ({reason}): pass a writable folder with --cache_dir"
            ) from error

    def encode(self, done: int) -> None:
        """Encode all pictures from number ``done`` on."""
        self.space.prepare(self.state.device)
        fill(self._mine, self.state, done, self._rows, doing="encoding", batch_size=BATCH_SIZE)

    def finish(self) -> Path:
        """Measure the scales of the channels, and give the store its name."""
        writer, info = self._mine, self.pictures.info
        mean, std = channel_scales(writer.stage / LATENTS_FILE, writer.length, writer.rows[LATENTS_FILE])
        latents = {
            "autoencoder": self.autoencoder.name,
            "pictures": self.pictures.fingerprint,
            "mean": mean,
            "std": std,
        }
        more = {"source": info.source, "image_size": info.image_size, "class_names": info.class_names}
        try:
            writer.finish(np.asarray(self.pictures.labels), latents=latents, **more)
        except OSError as error:
            raise no_room(writer, error) from error
        return writer.path

    @property
    def _mine(self) -> StoreWriter:
        return self._writer(latents_path(self.pictures, self.autoencoder, mirrored=self.mirrored))

    def _writer(self, path: Path) -> StoreWriter:
        row = (1 + self.mirrored, *self.autoencoder.shape_of(self.pictures.info.image_size))
        return StoreWriter(path, len(self.pictures), {LATENTS_FILE: row}, "latents")

    @torch.no_grad()
    def _rows(self, numbers: Sequence[int]) -> Mapping[str, Tensor]:
        images = self.pictures.read_batch(numbers)["images"].to(self.state.device)
        variants = [images, images.flip(-1)][: 1 + self.mirrored]
        latents = torch.cat([self.space.from_pictures(each) for each in variants], dim=1).half()
        require(
            bool(latents.isfinite().all()),
            f"--autoencoder {self.autoencoder.name} gives latents of {self.pictures.info.source} that are not finite, "
            "or too large for float16: choose another autoencoder",
        )
        return {LATENTS_FILE: latents}
