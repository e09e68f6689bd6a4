"""The example on Wan: on tiny models of the same classes, its numbers are those of diffusers."""

import errno
import json
import os
import resource
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from accelerate import PartialState
from PIL import Image
from safetensors.torch import load_file

import train_wan as example
import wan_pipeline
from clips import find_clips
from encoded_clips import encode_clips
from rectified_flow.condition import all_none, drop
from rectified_flow.errors import UsageError
from rectified_flow.flags import flag_types, parse
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.solvers import Guidance, guided, integrate
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.system.outputs import RECORD
from tests.examples.wan.tiny_wan import save_clips, save_pipeline
from tests.programs import program
from tests.ranks import run_on_ranks
from tests.training.runs import losses
from wan_flags import WanConfig, WanFlags
from wan_flow import Captions, ClipFlow, ExpertTimes, WanNetwork
from wan_pipeline import Wan

SIZE = "--frames 9 --height 32 --width 32"
FLAGS = (
    f"{SIZE} --lora_rank 4 --lora_alpha 8 --train_num_steps 6 --save_every 3 --sample_every 6 --log_every 1"
    " --lr_warmup_steps 0 --learning_rate 1e-2 --preview_clips 1 --preview_steps 2 --preview_guidance 1"
)
ENDS = (
    "--frames 1 --lora_rank 1 --caption_dropout 1 --fps 100 --preview_clips 0 --no_gradient_checkpointing",
    "--frames 5 --train full --caption_dropout 0 --fps 1 --preview_clips 9 --preview_steps 1 --noise_range 0.9 1",
)

LARGEST = str(2**53 - 1)
BEYOND: dict[str, tuple[str, ...]] = {
    "model": ("/dev/null", "x" * 300),
    "dataset_path": ("/dev/zero", "missing"),
    "frames": ("2", "100001", LARGEST),
    "height": ("1", str(2**31), LARGEST),
    "width": ("1", str(2**31), LARGEST),
    "fps": ("1e-320", "0.01", "1e30", "1e300"),
    "cache_dir": ("/dev/null",),
    "train": ("x",),
    "lora_rank": (LARGEST,),
    "lora_alpha": ("1e-320", "1e30", "1e300"),
    "noise_range": ("0 1e-320", "0.9999999999999999 1", "1 1"),
    "time_shift": ("1e-320", "1e300"),
    "first_frame": ("",),
    "gradient_checkpointing": ("0",),
    "caption_dropout": ("1e-320", "1.5"),
    "preview_clips": ("-1",),
    "preview_steps": ("0", LARGEST),
    "preview_guidance": ("1e30", "1e300"),
}
"""Values of each flag at the ends of its range, and beyond."""


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wan")
    return {kind: save_pipeline(folder / kind, kind) for kind in ("one", "two", "tokens")}


def flags_of(words: str) -> Any:
    return parse(WanFlags, "", words.split())


def wan_of(model: Path, clips: Path, more: str = "") -> Any:
    flags = flags_of(f"--model {model} --dataset_path {clips} {SIZE} {more}")
    return Wan(flags.wan, torch.device("cpu"))


def train(words: list[str]) -> list[str | None]:
    """Run the example for each line of flags; returns the sentences that refuse them."""
    said: list[str | None] = []
    for each in words:
        try:
            example.train(flags_of(each))
            said.append(None)
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, clips: Path, models: dict[str, Path]) -> Path:
    """Train the same run on one process, on two processes, and with an interruption; also train on first frames."""
    folder = tmp_path_factory.mktemp("runs")
    base = f"--model {models['one']} --dataset_path {clips} {FLAGS}"
    first = base.replace(str(models["one"]), str(models["tokens"]))
    assert run_on_ranks(2, train, [f"{base} --batch_size 1 --output_dir {folder}/2"]) == [[None]] * 2
    lines = [
        f"{base} --batch_size 2 --output_dir {folder}/1",
        f"{base} --batch_size 2 --output_dir {folder}/resumed --train_num_steps 3",
        f"{base} --batch_size 2 --output_dir {folder}/resumed",
        f"{first} --batch_size 2 --output_dir {folder}/first --first_frame --train_num_steps 2",
    ]
    assert run_on_ranks(1, train, lines) == [[None] * 4]
    return folder


def ended(calls: list[list[str]]) -> list[tuple[int, str]]:
    """Run the program for each call, with a limit of memory; returns its exit codes and what it wrote to stderr."""
    resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, resource.RLIM_INFINITY))
    return [program("train_wan.py", words) for words in calls]


@pytest.mark.slow
def test_each_flag_beyond_its_range_is_a_sentence(clips: Path, models: dict[str, Path], tmp_path: Path) -> None:
    assert flag_types(WanConfig).keys() == BEYOND.keys()
    base = f"--model {models['one']} --dataset_path {clips} {FLAGS} --cache_dir {tmp_path}/cache --train_num_steps 1"
    words = [["--" + flag, *value.split()] for flag, values in BEYOND.items() for value in values]
    calls = [[*base.split(), "--output_dir", f"{tmp_path}/{number}", *each] for number, each in enumerate(words)]
    for call, (code, text) in zip(words, run_on_ranks(1, ended, calls)[0], strict=True):
        assert code in (0, 1, 2), (call, text)
        assert "Traceback" not in text, (call, text)


def test_the_run_is_the_same_on_one_and_two_processes(runs: Path) -> None:
    one, two = losses(runs / "1"), losses(runs / "2")
    assert list(one) == list(range(1, 7))
    assert two == pytest.approx(one, rel=1e-4)


def test_it_resumes_byte_equal(runs: Path) -> None:
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        straight, resumed = (runs / run / "checkpoints/step_00000006" / name for run in ("1", "resumed"))
        assert straight.read_bytes() == resumed.read_bytes(), name


def test_what_is_frozen_is_not_saved(runs: Path) -> None:
    names = load_file(runs / "1/checkpoints/step_00000006/model.safetensors")
    assert names
    assert all("lora" in name for name in names)


@pytest.mark.parametrize("run", ["1", "first"])
def test_previews_are_a_motion_and_a_strip(runs: Path, run: str) -> None:
    stem = max((runs / run / "samples").iterdir()).with_suffix("")
    with Image.open(stem.with_suffix(".gif")) as motion:
        assert (motion.n_frames, motion.size) == (9, (32, 32))  # type: ignore[attr-defined]
    assert Image.open(stem.with_suffix(".png")).size == (8 * 32, 32)
    assert json.loads((runs / run / "previews.jsonl").read_text().splitlines()[-1])["clips"] == 1


def test_a_saved_lora_changes_the_pipeline_by_what_was_trained(runs: Path, models: dict[str, Path]) -> None:
    """With alpha other than the rank, which is lost where the file does not carry it."""
    inputs = torch.randn(2, 16, 3, 4, 4), torch.tensor([900.0, 100.0]), torch.randn(2, 7, 32)
    pipeline = diffusers.WanPipeline.from_pretrained(models["one"])
    with torch.no_grad():
        before = pipeline.transformer(*inputs, return_dict=False)[0]
        pipeline.load_lora_weights(runs / "1/lora")
        after = pipeline.transformer(*inputs, return_dict=False)[0]
        trained = wan_of(models["one"], runs, "--lora_rank 4 --lora_alpha 8").transformer()
        weights = load_file(runs / "1/checkpoints/step_00000006/ema.safetensors")
        trained.load_state_dict(
            {name.removeprefix("transformer."): each for name, each in weights.items()}, strict=False
        )
        expected = trained(*inputs, return_dict=False)[0]
    assert (after - before).norm() > 1e-3 * before.norm(), "nothing was learned"
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def flow_of(wan: Any, transformer: Any, *, first_frame: bool = False, empty: torch.Tensor | None = None) -> Any:
    empty = torch.zeros(7, 32) if empty is None else empty
    network = WanNetwork(transformer, empty, "here")
    return ClipFlow(network, first_frame=first_frame, space=wan.space).eval()


def test_the_loss_is_that_of_diffusers(models: dict[str, Path], clips: Path) -> None:
    wan = wan_of(models["one"], clips)
    transformer: Any = wan.transformer()
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    x_0, noise, text = torch.randn(2, *wan.space.shape), torch.randn(2, *wan.space.shape), torch.randn(2, 7, 32)
    t = torch.tensor([0.25, 0.875])
    scheduler.sigmas, scheduler.timesteps = t, 1000 * t
    noisy = scheduler.scale_noise(x_0, 1000 * t, noise)
    predicted = transformer(noisy, 1000 * t, text, return_dict=False)[0]
    expected = torch.nn.functional.mse_loss(predicted, noise - x_0)
    torch.testing.assert_close(flow_of(wan, transformer).loss(x_0, noise, t, {"text": text}), expected)


def test_a_given_first_frame_has_neither_noise_nor_loss(models: dict[str, Path], clips: Path) -> None:
    wan = wan_of(models["tokens"], clips)
    flow = flow_of(wan, wan.transformer(), first_frame=True)
    x_0, noise, text = torch.randn(2, *wan.space.shape), torch.randn(2, *wan.space.shape), torch.randn(2, 7, 32)
    t, other = torch.tensor([0.25, 0.875]), noise.clone()
    other[:, :, 0] = 7
    losses_of = [flow.loss(x_0, each, t, {"text": text}) for each in (noise, other)]
    assert torch.equal(*losses_of), "the noise of the first frame is not seen"
    seen: list[torch.Tensor] = []
    flow.network.transformer.register_forward_pre_hook(lambda _module, inputs: seen.extend(inputs[:2]))
    flow.loss(x_0, noise, t, {"text": text})
    x_t, times = seen
    assert torch.equal(x_t[:, :, 0], x_0[:, :, 0])
    tokens = x_0.shape[3] * x_0.shape[4] // 4
    assert times[:, :tokens].eq(0).all()
    assert torch.equal(times[:, tokens:], (1000 * t)[:, None].expand(-1, times.shape[1] - tokens))


@pytest.mark.parametrize("kind", ["one", "tokens"])
def test_our_euler_is_the_pipelines(models: dict[str, Path], clips: Path, kind: str) -> None:
    """On the scheduler's own grid; from text, and from a first frame."""
    wan = wan_of(models[kind], clips, "--first_frame" if kind == "tokens" else "")
    pipeline, transformer = wan.pipeline(wan.transformer()), wan.transformer()
    pipeline.set_progress_bar_config(disable=True)
    x, text, empty = torch.randn(1, *wan.space.shape), torch.randn(1, 7, 32), torch.randn(1, 7, 32)
    given: dict[str, Any] = {}
    known = torch.zeros(1, wan.space.shape[0], 0, *wan.space.shape[2:])
    if kind == "tokens":
        given["image"] = torch.rand(1, 3, 32, 32)
        latents = wan.vae.encode(given["image"][:, :, None] * 2 - 1).latent_dist.mode()
        known = wan.space.encode(latents[:, None, None])
    expected = pipeline(
        prompt_embeds=text, negative_prompt_embeds=empty, height=32, width=32, num_frames=9, num_inference_steps=4,
        guidance_scale=3.0, latents=x.clone(), output_type="latent", **given,
    ).frames  # fmt: skip
    network, frames = WanNetwork(transformer, empty[0], "here"), known.shape[2]

    def velocity(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat((known.expand(len(x), -1, -1, -1, -1), x[:, :, frames:]), dim=2)
        return network(x, t, text, known_frames=frames)

    with torch.no_grad():
        field = guided(velocity, network.conditions, {"text": text}, Guidance(3.0))
        ours = integrate(field, x, pipeline.scheduler.sigmas.tolist(), "euler")
    torch.testing.assert_close(ours[:, :, frames:], expected[:, :, frames:], atol=1e-5, rtol=1e-5)


def test_clips_are_encoded_as_the_pipeline_does(models: dict[str, Path], clips: Path) -> None:
    wan = wan_of(models["one"], clips)
    found = find_clips(clips)
    dataset = encode_clips(wan, found, PartialState())
    assert len(dataset) == 5
    item = dataset.read_batch([3])
    assert (item["latents"].shape, item["text"].shape) == ((1, 1, 2, 16, 3, 4, 4), (1, 512, 32))
    pipeline = wan.pipeline(None, with_text=True)
    text, empty = pipeline.encode_prompt(found[3].caption, negative_prompt="", max_sequence_length=512)
    torch.testing.assert_close(item["text"].float(), text, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(dataset.empty[None], empty, atol=2e-3, rtol=1e-3)
    pixels = found[3].decode(9, 32, 32, 16).float().permute(1, 0, 2, 3)[None] / 127.5 - 1
    expected = wan.vae.encode(pixels).latent_dist
    torch.testing.assert_close(item["latents"][:, 0, 0].float(), expected.mean, atol=2e-3, rtol=1e-3)
    scales = (
        torch.tensor(each)[:, None, None, None] for each in (wan.vae.config.latents_mean, wan.vae.config.latents_std)
    )
    mean, std = scales
    torch.testing.assert_close(wan.space.encode(item["latents"]), (item["latents"][:, 0, 0].float() - mean) / std)


def test_captions_are_dropped_for_the_empty_one() -> None:
    empty, text = torch.randn(7, 32), torch.randn(400, 7, 32)
    kind = Captions(empty)
    with deterministic(BatchRows(0, 0, 400, slice(None))):
        dropped = all_none({"text": kind}, drop({"text": kind}, {"text": text}, 0.25))
    assert 70 < dropped.sum() < 130


def test_times_of_one_expert_are_those_of_all_within_its_range() -> None:
    torch.manual_seed(0)
    everything = ExpertTimes(3.0, 0.0, 1.0).draw(200_000, torch.device("cpu"))
    within = everything[(everything > 0.875) & (everything < 1)]
    drawn = ExpertTimes(3.0, 0.875, 1.0).draw(50_000, torch.device("cpu"))
    assert drawn.min() >= 0.875
    shares = torch.linspace(0.05, 0.95, 10)
    torch.testing.assert_close(drawn.quantile(shares), within.quantile(shares), atol=2e-3, rtol=0)


def test_the_expert_is_that_of_the_noise_range(models: dict[str, Path], clips: Path) -> None:
    assert wan_of(models["two"], clips, "--noise_range 0.875 1").expert == "transformer"
    assert wan_of(models["two"], clips, "--noise_range 0 0.875").expert == "transformer_2"
    assert wan_of(models["one"], clips).time_shift == 5.0, "the scheduler's"


def test_bad_input(models: dict[str, Path], clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.mp4").write_bytes(b"no video")
    (tmp_path / "mute").mkdir()
    for name in ("vace", "partless"):
        shutil.copytree(models["one"], tmp_path / name)
    shutil.rmtree(tmp_path / "partless/transformer")
    settings = tmp_path / "vace/transformer/config.json"
    settings.write_text(settings.read_text().replace("WanTransformer3DModel", "WanVACETransformer3DModel"))
    (tmp_path / "mute/a.mp4").write_bytes(b"no video")
    (tmp_path / "broken/caption.txt").write_text("a square")
    one = f"--model {models['one']} --output_dir {tmp_path}/run --preview_clips 0 {SIZE}"
    cases = {
        f"{one} --dataset_path {tmp_path}/none": "is not a folder",
        f"{one} --dataset_path {tmp_path}/empty": "contains no clips (gif, mkv, mov, mp4, webm, or folders of frames)",
        f"{one} --dataset_path {tmp_path}/mute": "a.mp4 has no caption: write one into a.txt",
        f"{one} --dataset_path {tmp_path}/broken": "a.mp4 cannot be read",
        f"{one} --dataset_path {clips} --frames 13": "has 9 frames at 16 frames per second, fewer than --frames 13",
        f"{one} --dataset_path {clips} --frames 8": "--frames is 8; it must be 1 more than a multiple of 4",
        f"{one} --dataset_path {clips} --height 24": "--height is 24; it must be a multiple of 16",
        f"{one} --dataset_path {clips} --first_frame": "--first_frame needs a model with a separate time",
        f"{one} --dataset_path {clips} --model {models['two']}": "pass --noise_range 0.875 1 or 0 0.875",
        f"{one} --dataset_path {clips} --model {tmp_path}/empty": "cannot be found",
        f"{one} --dataset_path {clips} --num_samples 4": "pass --preview_clips instead",
        f"{one} --dataset_path {clips} --batch_size 6": "has 5 clips, fewer than one global batch",
        f"{one} --dataset_path {clips} --output_dir {clips}/run": "lies inside --dataset_path",
        f"{one} --dataset_path {clips} --model {tmp_path}/vace": "the transformer of --model",
        f"{one} --dataset_path {clips} --model {tmp_path}/partless": "has no transformer",
        f"{one} --dataset_path {clips} --noise_range 1 0": "--noise_range is 1 0",
        f"--dataset_path {clips}": "--model is missing",
    }
    for words, sentence in cases.items():
        with pytest.raises(UsageError) as caught:
            example.train(flags_of(words))
        assert sentence in str(caught.value)
    monkeypatch.setattr(wan_pipeline, "memory", lambda: 1000)
    with pytest.raises(UsageError, match=r"--train full needs .* GB .* pass --train lora"):
        assert wan_of(models["one"], clips, "--train full").settings


@pytest.mark.slow
@pytest.mark.parametrize("flags", ENDS)
def test_flags_at_both_ends(clips: Path, models: dict[str, Path], tmp_path: Path, flags: str) -> None:
    words = f"--model {models['one']} --dataset_path {clips} {FLAGS} --train_num_steps 1 --sample_every 1"
    assert run_on_ranks(1, train, [f"{words} --output_dir {tmp_path} {flags}"]) == [[None]]
    assert (tmp_path / "checkpoints/step_00000001").exists()


@pytest.mark.parametrize("flags", ["--lora_alpha 4", "--noise_range 0 0.5", "--time_shift 1"])
def test_a_run_does_not_go_on_as_another(runs: Path, models: dict[str, Path], clips: Path, flags: str) -> None:
    """Nothing in the weights would tell."""
    words = f"--model {models['one']} --dataset_path {clips} {FLAGS} --batch_size 2 --output_dir {runs}/1"
    with pytest.raises(UsageError, match=rf"was trained with {flags.split(maxsplit=1)[0]} .*, but this run has"):
        example.check_same_run(flags_of(f"{words} {flags}"))
    example.check_same_run(flags_of(f"{words} --caption_dropout 0.3"))


def test_other_weights_encode_anew(models: dict[str, Path], clips: Path, tmp_path: Path) -> None:
    wan = wan_of(models["one"], clips)
    before = wan.encoders
    other = shutil.copytree(models["one"], tmp_path / "other")
    assert wan_of(other, clips).encoders != before
    os.utime(next((other / "vae").iterdir()), (1, 1))
    assert wan_of(models["one"], clips).encoders == before


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, models: dict[str, Path], clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState()

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rectified_flow.system.pictures.write_output", full)
    monkeypatch.setattr("wan_callbacks.write_output", full)
    words = f"--model {models['one']} --dataset_path {clips} {FLAGS} --batch_size 2 --output_dir {tmp_path}/run"
    assert example.train(flags_of(f"{words} --train_num_steps 2"))
    assert (tmp_path / "run/checkpoints/step_00000002").exists()
    assert not (tmp_path / "run/lora/pytorch_lora_weights.safetensors").exists()


def test_a_lora_of_the_users_is_refused_before_the_clips_are_read(models: dict[str, Path], tmp_path: Path) -> None:
    words = f"--model {models['one']} --dataset_path {tmp_path}/none --output_dir {tmp_path}/run {FLAGS}"
    mine = tmp_path / "run/lora/pytorch_lora_weights.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"run/lora would be overwritten, and this project did not write it"):
        example.train(flags_of(words))
    assert mine.read_text() == "mine"
    mine.unlink()
    mine.parent.rmdir()
    for _ in range(2):
        with pytest.raises(UsageError, match="is not a folder"):
            example.train(flags_of(words))
    mine.write_text("mine, though in a folder of the project")
    (mine.parent / RECORD).write_text('{"files": []}')
    with pytest.raises(UsageError, match=r"pytorch_lora_weights\.safetensors would be overwritten"):
        example.train(flags_of(words))


@pytest.mark.slow
def test_a_run_without_records_writes_its_lora_again(
    runs: Path, models: dict[str, Path], clips: Path, tmp_path: Path
) -> None:
    """Commit 2b575ae wrote no records."""
    run = shutil.copytree(runs / "1", tmp_path / "run")
    for record in run.rglob(RECORD):
        record.unlink()
    before = (run / "lora/pytorch_lora_weights.safetensors").read_bytes()
    words = f"--model {models['one']} --dataset_path {clips} {FLAGS} --batch_size 2 --output_dir {run}"
    assert run_on_ranks(1, train, [f"{words} --train_num_steps 7"]) == [[None]]
    assert (run / "lora/pytorch_lora_weights.safetensors").read_bytes() != before


def test_objectives_that_need_an_interval_are_refused(models: dict[str, Path], clips: Path) -> None:
    wan = wan_of(models["one"], clips)
    network = WanNetwork(wan.transformer(), torch.zeros(7, 32), "here")
    flow = MeanFlow(network, space=wan.space)
    with pytest.raises(UsageError, match="a Wan transformer does not accept r: train it as a rectified flow"):
        flow(latents=torch.randn(2, 1, 1, *wan.space.shape), text=torch.randn(2, 7, 32))


def test_captions_and_frames_of_videos(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (40, 20), (10 * number, 0, 0)) for number in range(12)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=50)
    (tmp_path / "a.txt").write_text("beside")
    frames[0].save(tmp_path / "b.gif", save_all=True, append_images=frames[1:], duration=50)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.gif", "text": "listed"}\n')
    found = find_clips(tmp_path)
    assert [clip.caption for clip in found] == ["beside", "listed"]
    every, slower = (found[0].decode(5, 16, 16, fps).float().mean(dim=(2, 3))[:, 0] for fps in (100, 10))
    np.testing.assert_allclose(every, [0, 10, 20, 30, 40], atol=6)
    np.testing.assert_allclose(slower, [0, 20, 40, 60, 80], atol=6)
    numbered = tmp_path / "frames"
    numbered.mkdir()
    for number in range(12):
        frames[number].save(numbered / f"{number}.png")
    (numbered / "caption.txt").write_text("in order")
    [in_order] = find_clips(tmp_path)[2:]
    np.testing.assert_array_equal(in_order.decode(12, 4, 4, 16)[:, 0, 0, 0], range(0, 120, 10))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.gif", "text": null}\n')
    with pytest.raises(UsageError, match=r"line 1 of .* has no file_name and text"):
        find_clips(tmp_path)


def test_a_video_that_starts_late_keeps_its_pace(tmp_path: Path) -> None:
    with av.open(tmp_path / "a.mkv", "w") as container:
        stream = container.add_stream("mpeg4", rate=60)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 5 * number, np.uint8))
            frame.pts, frame.time_base = 60 + number, Fraction(1, 60)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (tmp_path / "a.txt").write_text("grey becomes white")
    [clip] = find_clips(tmp_path)
    levels = clip.decode(5, 16, 16, 15).float().mean(dim=(1, 2, 3))
    np.testing.assert_allclose(levels, [0, 20, 40, 60, 80], atol=6)


def test_copied_clips_are_the_same_data(models: dict[str, Path], clips: Path, tmp_path: Path) -> None:
    """Encoded again, as nobody knows; but a run goes on with them."""
    copied = shutil.copytree(clips, tmp_path / "copied", copy_function=shutil.copyfile)
    first, second = (
        encode_clips(wan_of(models["one"], folder), find_clips(folder), PartialState()) for folder in (clips, copied)
    )
    assert first.path != second.path
    assert first.fingerprint == second.fingerprint
    (copied / "clip 0/caption.txt").write_text("another")
    changed = encode_clips(wan_of(models["one"], copied), find_clips(copied), PartialState())
    assert changed.fingerprint != first.fingerprint
