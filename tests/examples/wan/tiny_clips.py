"""Tiny clips with captions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def moving_square(number: int, frames: int = 9, side: int = 32) -> list[Image.Image]:
    """Return frames in which a square moves to the right."""
    images = []
    for frame in range(frames):
        pixels = np.zeros((side, side, 3), np.uint8)
        pixels[8:16, frame : frame + 8, number % 3] = 200 + number
        images.append(Image.fromarray(pixels))
    return images


def save_gif(path: Path, images: Sequence[Image.Image], pause: int = 50) -> Path:
    """Write images as a video, each shown for ``pause`` milliseconds."""
    images[0].save(path, save_all=True, append_images=images[1:], duration=pause)
    return path


def save_frames(folder: Path, images: Sequence[Image.Image]) -> Path:
    """Write images as a folder of frames, whose names have numbers without leading zeros."""
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    return folder


def save_clips(folder: Path) -> Path:
    """Save five clips: three videos with a text beside each, a listed video, and a folder of frames."""
    for number in range(4):
        save_gif(folder / f"{number}.gif", moving_square(number))
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"a {'red' if number % 2 else 'blue'} square moves right")
    (folder / "metadata.jsonl").write_text('{"file_name": "3.gif", "text": "a red square moves right"}\n')
    frames = save_frames(folder / "frames", moving_square(4))
    (frames / "caption.txt").write_text("a blue square moves right")
    return folder
