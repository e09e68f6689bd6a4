"""A folder of clips with captions: videos, or folders of frames."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import printable, read_bytes
from rectified_flow.system.pictures import IMAGE_SUFFIXES, open_picture

VIDEO_SUFFIXES = (".gif", ".mkv", ".mov", ".mp4", ".webm")
FRAME_SUFFIXES = IMAGE_SUFFIXES - {*VIDEO_SUFFIXES}
METADATA_FILE, CAPTION_FILE = "metadata.jsonl", "caption.txt"
CAPTION_KEYS = ("text", "caption", "prompt")


@dataclass(frozen=True)
class Clip:
    """A video file or a folder of frames, and its caption."""

    path: Path
    caption: str

    def decode(self, frames: int, height: int, width: int, fps: float) -> Tensor:
        """Return the first frames, uint8 ``[f, 3, h, w]``, resized to cover the size and cropped to the centre.

        Args:
            frames: number of frames.
            height: height of a frame [px].
            width: width of a frame [px].
            fps: frames per second; frames of a faster video are left out. All frames of a folder are used.

        Raises:
            UsageError: if the clip cannot be read, or is too short.
        """
        if not self.path.is_dir():
            import av  # noqa: F401  a missing package is not a broken clip
        taken: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
        try:
            for image in _frames(self.path, fps):
                fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
                taken.append(np.asarray(fitted))
                if len(taken) == frames:
                    break
        except Exception as error:  # every decoder fails in its own way
            raise UsageError(f"clip {printable(self.path)} cannot be read ({first_line(error)}): remove it") from error
        if len(taken) != frames:
            rate = "" if self.path.is_dir() else f" at --fps {fps:g}"
            few = f"has {len(taken)} frames{rate}, fewer than --frames {frames}"
            raise UsageError(f"clip {printable(self.path)} {few}: remove it, or lower --frames")
        return torch.from_numpy(np.stack(taken)).permute(0, 3, 1, 2)


def find_clips(folder: Path) -> list[Clip]:
    """Return all clips below ``folder``.

    The caption of a clip is in ``metadata.jsonl`` (rows with ``file_name``, and ``text``, ``caption`` or ``prompt``),
    in a file beside the clip with the suffix ``.txt``, or in ``caption.txt``, which holds for all clips of its folder.

    Raises:
        UsageError: if the folder has no clips, a clip has no caption, or a caption cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"--dataset_path {folder} is not a folder: pass a folder of clips with captions")
    listed = _listed_captions(folder / METADATA_FILE)
    clips = [
        Clip(path, listed[path.resolve()] if path.resolve() in listed else _caption_beside(path))
        for path in _paths(folder)
    ]
    if not clips:
        kinds = ", ".join(suffix[1:] for suffix in VIDEO_SUFFIXES)
        empty = f"--dataset_path {folder} contains no clips ({kinds}, or folders of frames)"
        raise UsageError(f"{empty}: choose another folder")
    return clips


def clips_fingerprint(clips: Sequence[Clip], *, times: bool) -> str:
    """Hash the captions, names and sizes of clips; with ``times``, also the times of their files."""
    digest = blake2b(digest_size=16)
    for clip in clips:
        for file in sorted(clip.path.iterdir()) if clip.path.is_dir() else [clip.path]:
            stat = file.stat()
            digest.update(repr((file.name, stat.st_size, stat.st_mtime_ns if times else 0)).encode())
        digest.update(clip.caption.encode())
    return digest.hexdigest()


def _paths(folder: Path) -> Iterator[Path]:
    """Yield in order the videos, and the folders that have pictures and no videos."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from [*_paths(path)] or ([path] if _pictures(path) else [])
        elif path.suffix.lower() in VIDEO_SUFFIXES:
            yield path


def _pictures(folder: Path) -> list[Path]:
    """Return the pictures of a folder in the order of the numbers in their names: 10 follows 9."""
    shown = (path for path in folder.iterdir() if not path.name.startswith("."))
    pictures = [path for path in shown if path.suffix.lower() in FRAME_SUFFIXES]
    parts = {path: re.split(r"(\d+)", path.name) for path in pictures}
    return sorted(pictures, key=lambda path: [int(part) if part.isdecimal() else part for part in parts[path]])


def _frames(path: Path, fps: float) -> Iterator[Image.Image]:
    if path.is_dir():
        for file in _pictures(path):
            with open_picture(file) as image:
                yield image
        return
    import av

    with av.open(path) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        due = -inf
        for frame in container.decode(video=0):
            time = frame.time or 0.0
            if frame.time is None or time >= due - 1e-3:
                yield frame.to_image().rotate(frame.rotation, expand=True)
                due = (due if time < due + 1 / fps else time) + 1 / fps  # after a gap, count from this frame


def _listed_captions(path: Path) -> dict[Path, str]:
    """Return the captions of a metadata file by clip."""
    captions = {}
    for number, row in enumerate(_read(path).split("\n") if path.exists() else [], start=1):
        if not row.strip():
            continue
        try:
            entry = json.loads(row)
            text = next(entry[key] for key in CAPTION_KEYS if isinstance(entry.get(key), str))
            captions[(path.parent / entry["file_name"]).resolve()] = text
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise UsageError(f"line {number} of {path} has no file_name and text: correct or remove it") from error
    return captions


def _caption_beside(path: Path) -> str:
    own = path.with_name(f"{path.name}.txt") if path.is_dir() else path.with_suffix(".txt")
    shared = [path / CAPTION_FILE, path.parent / CAPTION_FILE] if path.is_dir() else [path.parent / CAPTION_FILE]
    for file in (own, *shared):
        if file.exists():
            return _read(file).strip()
    raise UsageError(f"clip {printable(path)} has no caption: write one into {own.name}")


def _read(path: Path) -> str:
    return read_bytes(path).decode("utf-8-sig", errors="replace")
