"""Tests of the program that makes a tiny Wan pipeline and clips."""

from pathlib import Path

import pytest
import torch

import train_wan as example
from clips import find_clips
from make_tiny_model import COLOURS, FRAMES, LATENT_NOISE, SIDE, WAYS, TinyFlags, draw_disc, draw_random_disc, make
from rectified_flow.cli.settings import parse
from rectified_flow.errors import UsageError
from wan_flags import WanFlags
from wan_pipeline import Wan

RUN = (
    f"--frames {FRAMES} --height {SIDE} --width {SIDE} --lora_rank 0 --train_num_steps 1 --sample_every 1"
    " --num_samples 1 --sample_steps 1 --guidance_scale 1"
)


pytestmark = pytest.mark.slow  # it trains an autoencoder; mission/test_examples.py trains on clips of its own


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(parse(TinyFlags, "", f"--output_dir {folder} --steps 20".split()))
    return folder


def test_the_clips_show_what_their_captions_say(tiny: Path) -> None:
    drawn = {f"a {c} disc moves {w}": draw_disc(c, w) for c in COLOURS for w in WAYS}
    clips = find_clips(tiny / "clips")
    assert len({clip.caption for clip in clips}) == len(clips) == 4
    for clip in clips:
        pixels = clip.decode(FRAMES, SIDE, SIDE, fps=24).transpose(0, 1) / 127.5 - 1
        assert (pixels - drawn[clip.caption]).abs().max() < 1 / 127


def test_the_disc_moves_the_way_of_its_name() -> None:
    columns = torch.arange(SIDE).float()
    bright = (draw_disc("red", "right")[0] + 0.7).clamp(min=0)
    centres = (bright * columns).sum(dim=(1, 2)) / bright.sum(dim=(1, 2))
    assert (centres.diff() > 1).all()


def test_the_autoencoder_is_trained_and_its_statistics_are_measured(tiny: Path) -> None:
    wan = Wan(
        parse(WanFlags, "", f"--model {tiny}/model --dataset_path {tiny}/clips {RUN}".split()).wan, torch.device("cpu")
    )
    torch.manual_seed(1)
    discs = torch.stack([draw_random_disc() for _ in range(16)])
    distribution = wan.vae.encode(discs).latent_dist
    error = (wan.vae.decode(distribution.mean).sample - discs).square().mean()
    assert error < 0.25, "it is 0.55 before training"
    torch.testing.assert_close(distribution.std, torch.full_like(distribution.std, LATENT_NOISE))
    scaled = wan.space.encode(torch.stack((distribution.mean, distribution.std), dim=1)[:, None])
    std, mean = torch.std_mean(scaled, dim=(0, 2, 3, 4))
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=0.2)
    torch.testing.assert_close(std, torch.ones_like(std), rtol=0, atol=0.2)


def test_train_wan_trains_the_model_on_the_clips(tiny: Path, tmp_path: Path) -> None:
    words = f"--model {tiny}/model --dataset_path {tiny}/clips --cache_dir {tmp_path}/cache {RUN}"
    assert example.train(parse(WanFlags, "", f"{words} --output_dir {tmp_path}/run".split()))
    assert (tmp_path / "run/samples/step_00000001.png").exists()
    assert (tmp_path / "run/transformer").is_dir()


def test_a_folder_with_files_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty: delete it, or choose another folder"):
        make(parse(TinyFlags, "", f"--output_dir {tmp_path}".split()))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
