"""Clips and captions, encoded once by all processes together into a store in the cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from einops import rearrange
from torch import Tensor

from clips import Clip, clips_fingerprint
from rectified_flow.data.store import StoreDataset
from rectified_flow.data.store_writer import StoreWriter, claimed, default_cache_dir, fill, key_of
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.system.files import prepare_folder, printable
from wan_pipeline import Wan

CLIPS_VERSION = 3
TEXT_TOKENS = 512


class ClipDataset(StoreDataset):
    """Encoded clips, float16: ``latents`` ``[1, 2, c, f, h, w]``, ``text`` ``[tokens, d]`` and perhaps ``given``.

    The entry ``given`` has the first frame as the model takes it, see :class:`wan_flow.WanNetwork`. The last row of the
    store has the empty caption and no clip.
    """

    def __len__(self) -> int:
        return super().__len__() - 1

    @property
    def description(self) -> str:
        """The clips in one line."""
        shape = " x ".join(map(str, self.entries["latents"].shape[3:]))
        return f"{self.info.source}: {len(self)} clips, as latents of {shape}"

    @property
    def empty(self) -> Tensor:
        """The embedding of the empty caption."""
        return torch.from_numpy(self.entries["text"][len(self)].astype(np.float32))


def encode_clips(wan: Wan, clips: Sequence[Clip], state: PartialState) -> ClipDataset:
    """Encode all clips and captions, unless an earlier run has done so. Collective.

    Raises:
        UsageError: if a clip cannot be read, or is too short, or the cache cannot be written.
    """
    config, shape = wan.config, wan.space.shape
    how = (config.frames, config.height, config.width, config.fps, wan.first_frame)

    def name_of_store() -> str:
        return key_of(CLIPS_VERSION, clips_fingerprint(clips, times=True), how, wan.encoders)

    folder = prepare_folder("cache_dir", config.cache_dir or default_cache_dir())
    writer = StoreWriter(folder / f"clips-{on_main(state, name_of_store)}", len(clips) + 1, "clips")

    def info() -> dict[str, Any]:
        # A run resumes with clips that were copied: the identity of the data has no times of files.
        identity = key_of(clips_fingerprint(clips, times=False), how, shape)
        return {"source": str(config.dataset_path), "image_size": config.height, "pictures": identity}

    with claimed(writer) as is_missing:
        if is_missing:
            fill(writer, _encoder(wan, clips), info, batch_size=1)
    return ClipDataset(writer.path)


def _encoder(wan: Wan, clips: Sequence[Clip]) -> Callable[[Sequence[int]], Mapping[str, Tensor]]:
    """Return the function that makes a row of the store; the text encoder lives as long as the function."""
    config, shape, pipeline = wan.config, wan.space.shape or (), wan.load_pipeline(with_text=True)
    size = config.frames, config.height, config.width

    def given(pixels: Tensor) -> Tensor:
        """Return what the pipeline gives the transformer of the first frame of pixels ``[1, 3, f, h, w]``."""
        frames, height, width = size
        arguments = (pixels[:, :, 0], 1, shape[0], height, width, frames, torch.float32, wan.device)
        return pipeline.prepare_latents(*arguments)[1]

    @torch.no_grad()
    def encode(numbers: Sequence[int]) -> dict[str, Tensor]:
        [number] = numbers
        clip = clips[number] if number < len(clips) else Clip(config.dataset_path, "")
        if number < len(clips):
            frames = clip.decode(*size, config.fps)
        else:
            frames = torch.zeros(config.frames, 3, config.height, config.width)
        pixels = rearrange(frames.to(wan.device).float() / 127.5 - 1, "f c h w -> 1 c f h w")
        distribution = wan.vae.encode(pixels).latent_dist
        how = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT_TOKENS}
        row = {
            "latents": torch.stack((distribution.mean, distribution.std), dim=1)[:, None],
            "text": pipeline.encode_prompt(clip.caption, **how)[0],
            **({} if wan.first_frame == "none" else {"given": given(pixels)}),
        }
        halves = {name: values.half() for name, values in row.items()}
        if not all(bool(values.isfinite().all()) for values in halves.values()):
            raise UsageError(f"the encoding of clip {printable(clip.path)} is not finite in float16: remove the clip")
        return halves

    return encode
