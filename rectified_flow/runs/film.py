"""A film of a run: its grids of samples in the order of their steps. All grids start from the same noise.

The run wrote the grids every ``--sample_every`` steps, so that a film needs no network and no checkpoint.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from rectified_flow.errors import UsageError
from rectified_flow.system.files import reading
from rectified_flow.system.pictures import encode_motion, open_picture, over_white, text_picture

SECONDS, LONGEST, SHORTEST, LAST = 10.0, 0.5, 0.04, 2.0
"""Duration of a film, longest and shortest time of a frame, and extra time of the last frame [s]."""
LEAST_SIDE, TEXT_HEIGHT = 320, 20
"""Least width of a frame, which small grids are enlarged to reach, and height of the line below [px]."""
MOST_FRAMES = 500
CODECS = {"mp4": ("libx264", {"crf": "18"}), "webm": ("libvpx-vp9", {"crf": "24", "b": "0"})}

Frame = np.ndarray[Any, np.dtype[np.uint8]]
FilmFormat = Literal["gif", "webp", "mp4", "webm"]


def film_of(grids: Sequence[Path], kind: FilmFormat) -> bytes:
    """Return the contents of a file with a film of grids of samples, whose names end in their step.

    The most frequent size of grids is used; grids of other sizes, from before a change of ``--num_samples``, are left
    out. Of more than :data:`MOST_FRAMES` grids, that many evenly spaced ones are used.

    Raises:
        UsageError: if there are fewer than two grids, or the package ``av`` is missing for ``mp4`` and ``webm``.
        DamageError: if a grid cannot be read.
    """
    sizes = {path: _size(path) for path in grids}
    [(most, count)] = Counter(sizes.values()).most_common(1) or [((0, 0), 0)]
    if count < 2:
        raise UsageError(
            "a film needs at least two grids of samples of one size: pass the folder of a run as --checkpoint, "
            "or continue training with a smaller --sample_every"
        )
    chosen = [path for path, size in sizes.items() if size == most]
    chosen = [chosen[round(place)] for place in np.linspace(0, count - 1, min(count, MOST_FRAMES))]
    pause = min(LONGEST, max(SHORTEST, SECONDS / len(chosen)))
    frames = [_frame(path) for path in chosen]
    if kind in ("gif", "webp"):
        pauses = [round(1000 * pause)] * (len(frames) - 1) + [round(1000 * (pause + LAST))]
        return encode_motion(frames, pauses, f".{kind}")
    return _video([*frames, *[frames[-1]] * round(LAST / pause)], pause, kind)


def format_of(path: Path) -> FilmFormat:
    """Return the format of a film by the suffix of its file.

    Raises:
        UsageError: if it is none of :data:`FilmFormat`.
    """
    for kind in get_args(FilmFormat):
        if path.suffix.lower() == f".{kind}":
            return kind
    raise UsageError(f"--film {path} must end in .{', .'.join(get_args(FilmFormat))}")


def _size(path: Path) -> tuple[int, int]:
    with reading(path), open_picture(path) as image:
        return image.size


def _frame(path: Path) -> Frame:
    """Return a grid above its step, ``[h, w, 3]`` of even height and width."""
    with reading(path), open_picture(path) as image:
        grid = over_white(image)
    factor = -(-LEAST_SIDE // grid.width)
    grid = grid.resize((factor * grid.width, factor * grid.height), Image.Resampling.NEAREST)
    width, height = grid.width + grid.width % 2, grid.height + TEXT_HEIGHT
    frame = np.full((height + height % 2, width, 3), 255, np.uint8)
    frame[: grid.height, : grid.width] = np.asarray(grid)
    text = text_picture(f"step {int(path.stem.rpartition('_')[2]):,}", width, TEXT_HEIGHT)
    frame[grid.height : height] = text.permute(1, 2, 0).numpy()
    return frame


def _video(frames: Sequence[Frame], pause: float, kind: FilmFormat) -> bytes:
    """Return a video of frames ``[h, w, 3]``, each shown for ``pause`` seconds."""
    try:
        import av
    except ImportError as error:
        raise UsageError(f"a film as .{kind} needs the package av: pip install av, or write a .gif") from error
    content, (codec, options) = BytesIO(), CODECS[kind]
    with av.open(content, "w", format=kind) as container:
        rate = Fraction(round(1000 / pause), 1000)
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()
