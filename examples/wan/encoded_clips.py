"""Clips and captions, encoded once by all processes together into a store in the cache."""

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from einops import rearrange
from torch import Tensor

from clips import Clip, clips_fingerprint
from rectified_flow import LatentDataset
from rectified_flow.data.build import default_cache_dir
from rectified_flow.data.fill import encode
from rectified_flow.data.store import LATENTS_FILE, StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError
from rectified_flow.system.files import prepare_folder
from wan_pipeline import Wan

CLIPS_VERSION = 1
TEXT_FILE, TEXT_TOKENS = "text.float16", 512


class ClipDataset(LatentDataset):
    """Encoded clips: ``latents`` float16 ``[1, 2, c, f, h, w]`` and ``text`` float16 ``[tokens, d]``.

    The last row of the store has the empty caption and no clip.
    """

    def __len__(self) -> int:
        return super().__len__() - 1

    @property
    def description(self) -> str:
        """The clips in one line."""
        shape = " x ".join(map(str, self.info.rows[LATENTS_FILE][2:]))
        return f"{self.info.source}: {len(self)} clips, as latents of {shape} by {self.encoded.autoencoder}"

    @property
    def empty(self) -> Tensor:
        """The embedding of the empty caption."""
        return torch.from_numpy(self.entries["text"][len(self)].astype(np.float32))


def encode_clips(wan: Wan, clips: Sequence[Clip], state: PartialState) -> ClipDataset:
    """Encode all clips and captions, unless an earlier run has done so. This is a collective.

    Raises:
        UsageError: if a clip cannot be read, or is too short, or the cache cannot be written.
        RunError: if the disk is full.
    """
    config, space = wan.config, wan.space
    size = config.frames, config.height, config.width, config.fps
    key = on_main(state, lambda: _key(CLIPS_VERSION, clips_fingerprint(clips, times=True), size, wan.encoders))
    folder = prepare_folder("cache_dir", config.cache_dir or default_cache_dir())
    rows = {LATENTS_FILE: (1, 2, *(space.shape or ())), TEXT_FILE: (TEXT_TOKENS, int(wan.settings["text_dim"]))}
    writer = StoreWriter(folder / f"clips-{key[:16]}", len(clips) + 1, rows, "clips")

    def finish() -> None:
        latents = {
            "autoencoder": wan.index["vae"][1],
            "pictures": _key(clips_fingerprint(clips, times=False), size),  # a run resumes with clips that were copied
            "mean": space.mean,
            "std": space.std,
        }
        more = {"source": str(config.dataset_path), "image_size": config.height, "latents": latents}
        writer.complete(np.full(writer.length, -1), **more)

    encode(writer, state, _Encoder(wan, clips).rows, finish, batch_size=1)
    return ClipDataset(writer.path)


def _key(*values: object) -> str:
    return blake2b(repr(values).encode(), digest_size=16).hexdigest()


class _Encoder:
    """The encoder of clips and captions. The models are loaded with the first clip.

    Args:
        wan: the model.
        clips: all clips.
    """

    def __init__(self, wan: Wan, clips: Sequence[Clip]) -> None:
        self.wan, self.clips = wan, clips

    @torch.no_grad()
    def rows(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Encode the clips of some numbers; the number after the last clip has the empty caption."""
        rows = [self._row(number) for number in numbers]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, number: int) -> dict[str, Tensor]:
        config = self.wan.config
        clip = self.clips[number] if number < len(self.clips) else None
        text, _ = self._pipeline.encode_prompt(
            clip.caption if clip else "", do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
        )
        latents = torch.zeros(1, 2, *(self.wan.space.shape or ()))
        if clip is not None:
            frames = clip.decode(config.frames, config.height, config.width, config.fps).to(self.wan.device)
            pixels = rearrange(frames.float() / 127.5 - 1, "f c h w -> 1 c f h w")
            distribution = self.wan.vae.encode(pixels).latent_dist
            latents = torch.stack((distribution.mean, distribution.std), dim=1)
        row = {LATENTS_FILE: latents.cpu().half(), TEXT_FILE: text[0].cpu().half()}
        finite = all(bool(values.isfinite().all()) for values in row.values())
        where = clip.path if clip else "the empty caption"
        if not finite:
            raise UsageError(f"the encoding of {where} is not finite in float16: remove the clip")
        return row

    @cached_property
    def _pipeline(self) -> Any:
        return self.wan.pipeline(None, with_text=True)
