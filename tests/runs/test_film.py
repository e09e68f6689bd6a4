"""Films of the grids of samples of a run."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.runs.film import LAST, LEAST_SIDE, FilmFormat, film_of, format_of
from rectified_flow.runs.watched import WatchedRun

SHADES = (0, 100, 200)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a grid of one shade for each step, and an older grid of another size."""
    folder = tmp_path / "run" / "samples"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 9), "red").save(folder / "step_00000001.png")
    for number, shade in enumerate(SHADES):
        Image.new("RGB", (33, 21), (shade, shade, shade)).save(folder / f"step_{10 * (number + 1):08d}.png")
    return tmp_path / "run"


def shades_of(frames: list[np.ndarray]) -> list[int]:
    return [int(frame[:100, :100].mean().round()) for frame in frames]


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_a_film_shows_the_grids_of_one_size_in_the_order_of_their_steps(run: Path, kind: FilmFormat) -> None:
    film: Any = Image.open(io.BytesIO(film_of(WatchedRun(run).grids(), kind)))
    with film:
        frames, pauses = [], []
        for number in range(film.n_frames):
            film.seek(number)
            frames.append(np.asarray(film.convert("RGB")))
            pauses.append(film.info["duration"])
        assert film.width >= LEAST_SIDE
    assert shades_of(frames) == list(SHADES)
    assert pauses[0] == pauses[1] == pauses[2] - 1000 * LAST
    texts = [frame[-20:] for frame in frames]
    assert all((text < 128).any() for text in texts), "each names its step"
    assert (texts[0] != texts[1]).any()


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_video_shows_the_same_frames(run: Path, kind: str) -> None:
    content = film_of(WatchedRun(run).grids(), format_of(Path(f"film.{kind}")))
    film: Any = av.open(io.BytesIO(content))
    with film:
        assert kind in film.format.name
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    shades = np.array(shades_of(frames))
    assert np.abs(shades[: len(SHADES)] - SHADES).max() <= 3
    assert len(shades) > len(SHADES), "the last one stays"
    assert np.abs(shades[len(SHADES) :] - SHADES[-1]).max() <= 3


def test_what_makes_no_film_is_said_in_a_sentence(run: Path) -> None:
    with pytest.raises(UsageError, match="at least two grids"):
        film_of(WatchedRun(run).grids()[:2], "gif")
    (run / "samples/step_00000020.png").write_bytes(b"damaged")
    with pytest.raises(DamageError, match=r"step_00000020.png cannot be read"):
        film_of(WatchedRun(run).grids(), "gif")
    with pytest.raises(UsageError, match=r"must end in \.gif, \.webp, \.mp4, \.webm"):
        format_of(Path("film.avi"))
