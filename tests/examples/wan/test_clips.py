"""Tests of clips and captions as the example on Wan reads them."""

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from clips import Clip, clips_fingerprint, find_clips
from rectified_flow.errors import UsageError
from tests.examples.wan.tiny_clips import save_frames, save_gif

GREYS = [Image.new("RGB", (40, 20), (10 * number, 0, 0)) for number in range(12)]


def means(clip: Clip, frames: int, fps: float) -> list[float]:
    red = clip.decode(frames, 16, 16, fps).float()[:, 0]
    return red.mean(dim=(1, 2)).tolist()


def test_captions_are_beside_a_clip_listed_or_shared(tmp_path: Path) -> None:
    for name in ("beside.gif", "listed.gif", "sub/one.gif", "sub/two.gif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_gif(tmp_path / name, GREYS)
    save_frames(tmp_path / "frames", GREYS)
    save_frames(tmp_path / "more.frames", GREYS)
    (tmp_path / "beside.txt").write_text("from a text\n")
    (tmp_path / "more.frames.txt").write_text("beside a folder")
    (tmp_path / "frames/caption.txt").write_text("inside a folder")
    (tmp_path / "sub/caption.txt").write_text("for both")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "listed.gif", "caption": "from a list"}\n\n')
    found = {clip.path.relative_to(tmp_path).as_posix(): clip.caption for clip in find_clips(tmp_path)}
    assert found == {
        "beside.gif": "from a text",
        "frames": "inside a folder",
        "listed.gif": "from a list",
        "more.frames": "beside a folder",
        "sub/one.gif": "for both",
        "sub/two.gif": "for both",
    }


def test_frames_of_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    clip = Clip(save_frames(tmp_path / "frames", GREYS), "")
    assert means(clip, 12, 16) == list(range(0, 120, 10))


def test_hidden_files_are_no_frames_and_captions_may_be_empty(tmp_path: Path) -> None:
    for clip in ("one", "two"):
        (tmp_path / clip).mkdir()
        for number in (0, 1):
            Image.new("RGB", (8, 8), (100 * number, 0, 0)).save(tmp_path / clip / f"frame_{number}.png")
        Image.new("RGB", (8, 8), "white").save(tmp_path / clip / ".thumb.png")
    (tmp_path / "caption.txt").write_text("of all")
    rows = [{"file_name": "one", "text": ""}, {"file_name": "two", "text": "a\u2028b"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    clips = find_clips(tmp_path)
    assert [clip.caption for clip in clips] == ["", "a\u2028b"]
    assert clips[0].decode(2, 8, 8, 8).float().mean(dim=(1, 2, 3)).tolist() == pytest.approx([0, 100 / 3], abs=0.1)


def test_frames_of_a_faster_video_are_left_out(tmp_path: Path) -> None:
    clip = Clip(save_gif(tmp_path / "a.gif", GREYS, pause=50), "")
    np.testing.assert_allclose(means(clip, 5, 100), [0, 10, 20, 30, 40], atol=6)
    np.testing.assert_allclose(means(clip, 5, 10), [0, 20, 40, 60, 80], atol=6)


def test_a_video_that_starts_late_keeps_its_pace(tmp_path: Path) -> None:
    with av.open(tmp_path / "a.mkv", "w") as container:
        stream = container.add_stream("mpeg4", rate=60)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 5 * number, np.uint8))
            frame.pts, frame.time_base = 60 + number, Fraction(1, 60)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    np.testing.assert_allclose(means(Clip(tmp_path / "a.mkv", ""), 5, 15), [0, 20, 40, 60, 80], atol=6)


def test_frames_are_cropped_to_the_centre(tmp_path: Path) -> None:
    """A frame of 40 x 20 px whose left and right ends are white becomes black at 16 x 16 px."""
    pixels = np.full((20, 40, 3), 255, np.uint8)
    pixels[:, 6:34] = 0
    clip = Clip(save_frames(tmp_path / "frames", [Image.fromarray(pixels)]), "")
    assert clip.decode(1, 16, 16, 1).shape == (1, 3, 16, 16)
    assert clip.decode(1, 16, 16, 1).max() == 0
    assert clip.decode(1, 16, 32, 1).max() == 255


def test_the_identity_of_clips_has_their_captions_and_files(tmp_path: Path) -> None:
    frames = save_frames(tmp_path / "frames", GREYS)
    one = clips_fingerprint([Clip(frames, "a")], times=False)
    assert one == clips_fingerprint([Clip(frames, "a")], times=False)
    assert one != clips_fingerprint([Clip(frames, "b")], times=False)
    (frames / "11.png").unlink()
    assert one != clips_fingerprint([Clip(frames, "a")], times=False)


def test_bad_clips_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none is not a folder"):
        find_clips(tmp_path / "none")
    with pytest.raises(UsageError, match=r"contains no clips \(gif, mkv, mov, mp4, webm, or folders of frames\)"):
        find_clips(tmp_path)
    save_gif(tmp_path / "a.gif", GREYS)
    with pytest.raises(UsageError, match=r"a\.gif has no caption: write one into a\.txt"):
        find_clips(tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.gif", "text": null}\n')
    with pytest.raises(UsageError, match=r"line 1 of .* has no file_name and text"):
        find_clips(tmp_path)
    with pytest.raises(UsageError, match=r"a\.gif has 12 frames at --fps 100, fewer than --frames 13"):
        Clip(tmp_path / "a.gif", "").decode(13, 16, 16, 100)
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(UsageError, match=r"b\.mp4 cannot be read .*: remove it"):
        Clip(tmp_path / "b.mp4", "").decode(1, 16, 16, 1)
