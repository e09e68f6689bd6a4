"""A folder of clips with captions, encoded once by all processes together into a store in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor

from rectified_flow.data.build import StoreWriter, claimed, default_cache_dir, fill, key_of
from rectified_flow.data.store import StoreDataset
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import prepare_folder, printable, read_bytes
from wan import Wan

CLIPS_VERSION = 2
VIDEO_SUFFIXES = (".gif", ".mkv", ".mov", ".mp4", ".webm")


@dataclass(frozen=True)
class Clip:
    """A video file and its caption."""

    path: Path
    caption: str

    def decode(self, frames: int, height: int, width: int) -> Tensor:
        """Return the first frames, uint8 ``[f, 3, h, w]``, resized to cover the size and cropped to the centre."""
        import av

        taken: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
        try:
            with av.open(self.path) as container:
                for frame, _ in zip(container.decode(video=0), range(frames), strict=False):
                    image = frame.to_image().rotate(frame.rotation, expand=True)
                    taken.append(np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)))
        except Exception as error:  # every decoder fails in its own way
            raise UsageError(f"clip {printable(self.path)} cannot be read ({first_line(error)}): remove it") from error
        if len(taken) != frames:
            few = f"has {len(taken)} frames, fewer than --frames {frames}"
            raise UsageError(f"clip {printable(self.path)} {few}: remove it, or lower --frames")
        return torch.from_numpy(np.stack(taken)).permute(0, 3, 1, 2)


def find_clips(folder: Path) -> list[Clip]:
    """Return all clips below ``folder``, each with the caption in the ``.txt`` file of the same name."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES)
    if not paths:
        kinds = ", ".join(suffix[1:] for suffix in VIDEO_SUFFIXES)
        raise UsageError(f"--dataset_path {folder} contains no clips ({kinds}): choose another folder")
    return [Clip(path, read_bytes(path.with_suffix(".txt")).decode(errors="replace").strip()) for path in paths]


class ClipDataset(StoreDataset):
    """Encoded clips: ``latents`` float16 ``[1, 2, c, f, h, w]`` and ``text`` float16 ``[tokens, d]``.

    The last row of the store has the empty caption and no clip.
    """

    def __len__(self) -> int:
        return super().__len__() - 1

    @property
    def empty(self) -> Tensor:
        """The embedding of the empty caption."""
        return torch.from_numpy(self.entries["text"][len(self)].astype(np.float32))


def encode_clips(wan: Wan, clips: Sequence[Clip], cache_dir: Path | None, state: PartialState) -> ClipDataset:
    """Encode all clips and captions, unless an earlier run has done so. This is a collective."""
    shape = wan.space.shape or ()
    contents = [
        (each.caption, each.path.name, each.path.stat().st_size, each.path.stat().st_mtime_ns) for each in clips
    ]
    key = on_main(state, lambda: key_of(CLIPS_VERSION, contents, wan.size, wan.model))
    folder = prepare_folder("cache_dir", cache_dir or default_cache_dir())
    writer = StoreWriter(folder / f"clips-{key}", len(clips) + 1, "clips")

    @torch.no_grad()
    def encode(numbers: Sequence[int]) -> dict[str, Tensor]:
        [number] = numbers
        clip = clips[number] if number < len(clips) else None
        latents = torch.zeros(1, 1, 2, *shape)
        if clip is not None:
            pixels = rearrange(clip.decode(*wan.size).to(wan.device).float() / 127.5 - 1, "f c h w -> 1 c f h w")
            distribution = wan.vae.encode(pixels).latent_dist
            latents = torch.stack((distribution.mean, distribution.std), dim=1)[:, None]
        return {"latents": latents.half(), "text": wan.embed(clip.caption if clip else "").half()}

    def describe() -> dict[str, Any]:
        return {"source": "clips", "image_size": wan.size[1], "pictures": key}

    with claimed(writer) as is_missing:
        if is_missing:
            fill(writer, encode, describe, batch_size=1)
    return ClipDataset(writer.path)
