"""Tests of the example on Wan, on tiny models, against diffusers."""

import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file

import train_wan as example
from clips import encode_clips, find_clips
from rectified_flow import RectifiedFlow
from rectified_flow.cli.settings import parse
from rectified_flow.errors import UsageError
from rectified_flow.flows.solvers import Guidance
from tests.examples.wan.tiny_wan import save_clips, save_pipeline
from tests.ranks import run_on_ranks
from tests.training.runs import losses
from wan import Wan, WanNetwork

SIZE = "--frames 9 --height 32 --width 32"
FLAGS = (
    f"{SIZE} --lora_rank 4 --train_num_steps 4 --save_every 2 --log_every 1 --lr_warmup_steps 0 --learning_rate 1e-2"
)
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("wan") / "one")


def wan_of(model: Path) -> Wan:
    return Wan(str(model), (9, 32, 32), torch.device("cpu"))


def train(words: list[str]) -> None:
    for each in words:
        example.train(parse(example.WanFlags, "", each.split()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, clips: Path, model: Path) -> Path:
    """Train the same run on one process and on two processes."""
    folder = tmp_path_factory.mktemp("runs")
    base = f"--model {model} --dataset_path {clips} {FLAGS}"
    run_on_ranks(2, train, [f"{base} --batch_size 1 --output_dir {folder}/2"])
    run_on_ranks(1, train, [f"{base} --batch_size 2 --output_dir {folder}/1"])
    return folder


def test_the_run_is_the_same_on_one_and_two_processes(runs: Path) -> None:
    one = losses(runs / "1")
    assert list(one) == [1, 2, 3, 4]
    assert losses(runs / "2") == pytest.approx(one, rel=1e-4)


def test_a_saved_lora_changes_the_pipeline_by_what_was_trained(runs: Path, model: Path) -> None:
    weights = load_file(runs / "1/checkpoints/step_00000004/ema.safetensors")
    assert all("lora" in name for name in weights), "what is frozen is not saved"
    inputs = torch.randn(2, 16, 3, 4, 4), torch.tensor([900.0, 100.0]), torch.randn(2, 7, 32)
    pipeline, wan = diffusers.WanPipeline.from_pretrained(model), wan_of(model)
    wan.add_lora(4)
    wan.transformer.load_state_dict(
        {name.removeprefix("transformer."): each for name, each in weights.items()}, strict=False
    )
    with torch.no_grad():
        before = pipeline.transformer(*inputs, return_dict=False)[0]
        pipeline.load_lora_weights(runs / "1", weight_name=LORA)
        after = pipeline.transformer(*inputs, return_dict=False)[0]
        expected = wan.transformer(*inputs, return_dict=False)[0]
    assert (after - before).norm() > 1e-3 * before.norm(), "nothing was learned"
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def test_the_loss_is_that_of_diffusers(model: Path) -> None:
    wan = wan_of(model)
    shape = wan.space.shape or ()
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    x_0, noise, text, t = (
        torch.randn(2, *shape),
        torch.randn(2, *shape),
        torch.randn(2, 7, 32),
        torch.tensor([0.25, 0.875]),
    )
    scheduler.sigmas, scheduler.timesteps = t, 1000 * t
    noisy = scheduler.scale_noise(x_0, 1000 * t, noise)
    predicted = wan.transformer(noisy, 1000 * t, text, return_dict=False)[0]
    flow = RectifiedFlow(WanNetwork(wan.transformer, torch.zeros(7, 32), "here"), space=wan.space)
    expected = torch.nn.functional.mse_loss(predicted, noise - x_0)
    torch.testing.assert_close(flow.loss(x_0, noise, t, {"text": text}), expected)


def test_our_euler_is_the_pipelines(model: Path) -> None:
    """Compare with a scheduler without a shift, which has the noise levels of the uniform grid."""
    wan = wan_of(model)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(wan.pipeline.scheduler.config, shift=1.0)
    x, text, empty = torch.randn(1, *(wan.space.shape or ())), torch.randn(1, 7, 32), torch.randn(1, 7, 32)
    expected = x.clone()
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    with torch.no_grad():
        for t in scheduler.timesteps:
            one, other = (wan.transformer(expected, t[None], each, return_dict=False)[0] for each in (text, empty))
            expected = scheduler.step(other + 3 * (one - other), t, expected, return_dict=False)[0]
    flow = RectifiedFlow(WanNetwork(wan.transformer, empty[0], "here"), space=wan.space)
    ours = flow.sample(noise=x, text=text, steps=4, solver="euler", guidance=Guidance(3.0), decode=False)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_clips_are_encoded_as_the_pipeline_does(model: Path, clips: Path, tmp_path: Path) -> None:
    wan, found = wan_of(model), find_clips(clips)
    dataset = encode_clips(wan, found, tmp_path, PartialState())
    assert len(dataset) == 5
    item = dataset.read_batch([3])
    assert (item["latents"].shape, item["text"].shape) == ((1, 1, 2, 16, 3, 4, 4), (1, 512, 32))
    text, empty = wan.pipeline.encode_prompt(found[3].caption, negative_prompt="", max_sequence_length=512)
    torch.testing.assert_close(item["text"].float(), text, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(dataset.empty[None], empty, atol=2e-3, rtol=1e-3)
    pixels = found[3].decode(9, 32, 32).float().permute(1, 0, 2, 3)[None] / 127.5 - 1
    expected = wan.vae.encode(pixels).latent_dist
    torch.testing.assert_close(item["latents"][:, 0, 0].float(), expected.mean, atol=2e-3, rtol=1e-3)
    mean, std = (torch.tensor(each)[:, None, None, None] for each in (wan.space.mean, wan.space.std))
    torch.testing.assert_close(wan.space.encode(item["latents"]), (item["latents"][:, 0, 0].float() - mean) / std)


def test_bad_input(model: Path, clips: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mute").mkdir()
    (tmp_path / "mute/a.mp4").write_bytes(b"no video")
    shutil.copytree(tmp_path / "mute", tmp_path / "broken")
    (tmp_path / "broken/a.txt").write_text("a square")
    one = f"--model {model} --output_dir {tmp_path}/run {SIZE}"
    cases = {
        f"{one} --dataset_path {tmp_path}/empty": "contains no clips (gif, mkv, mov, mp4, webm)",
        f"{one} --dataset_path {tmp_path}/mute": "a.txt is missing",
        f"{one} --dataset_path {tmp_path}/broken": "a.mp4 cannot be read",
        f"{one} --dataset_path {clips} --frames 13": "has 9 frames, fewer than --frames 13",
        f"{one} --dataset_path {clips} --frames 8": "--frames is 8; it must be 1 more than a multiple of 4",
        f"{one} --dataset_path {clips} --height 24": "--height is 24; it must be a multiple of 16",
        f"{one} --dataset_path {clips} --model {tmp_path}/empty": "cannot be loaded",
        f"{one} --dataset_path {clips} --output_dir {clips}/run": "lies inside --dataset_path",
        f"--dataset_path {clips}": "--model is missing",
    }
    for words, sentence in cases.items():
        with pytest.raises(UsageError) as caught:
            train([words])
        assert sentence in str(caught.value)


def test_a_lora_of_the_users_is_refused_before_the_clips_are_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / LORA).write_text("mine")
    with pytest.raises(UsageError, match=r"would be overwritten, and this project did not write it"):
        train([f"--model {model} --dataset_path {tmp_path}/none --output_dir {tmp_path} {FLAGS}"])
    assert (tmp_path / LORA).read_text() == "mine"
