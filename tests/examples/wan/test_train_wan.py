"""Tests of the example on Wan: runs on tiny models, the files that they leave, and what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import PartialState
from PIL import Image
from safetensors.torch import load_file

import train_wan as example
from clips import Clip, find_clips
from encoded_clips import encode_clips
from rectified_flow.cli.settings import parse
from rectified_flow.errors import UsageError
from rectified_flow.runs import checkpoint
from tests.examples.wan.tiny_clips import save_clips
from tests.examples.wan.tiny_wan import Kind, save_pipeline
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses
from wan_flags import WanFlags
from wan_pipeline import Wan

SIZE = "--frames 9 --height 32 --width 32"
FLAGS = (
    f"{SIZE} --lora_rank 4 --lora_alpha 8 --train_num_steps 4 --save_every 2 --sample_every 4 --log_every 1"
    " --lr_warmup_steps 0 --learning_rate 1e-2 --num_samples 3 --sample_steps 2 --guidance_scale 1"
)
LORA = "pytorch_lora_weights.safetensors"
KINDS: tuple[Kind, ...] = ("text", "experts", "tokens", "image")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    folder = tmp_path_factory.mktemp("wan")
    return {kind: save_pipeline(folder / kind, kind) for kind in KINDS}


def flags_of(words: str) -> WanFlags:
    return parse(WanFlags, "", words.split())


def wan_of(model: Path, clips: Path, more: str = "") -> Wan:
    return Wan(flags_of(f"--model {model} --dataset_path {clips} {SIZE} {more}").wan, torch.device("cpu"))


def train(words: list[str]) -> None:
    for each in words:
        example.train(flags_of(each))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, clips: Path, models: dict[Kind, Path]) -> Path:
    """Train the same run on one process, on two, and with an interruption; also other models and all weights."""
    folder = tmp_path_factory.mktemp("runs")
    base = f"--dataset_path {clips} {FLAGS}"
    text, short = f"{base} --model {models['text']}", f"{base} --train_num_steps 1 --num_samples 1"
    run_on_ranks(2, train, [f"{text} --batch_size 1 --output_dir {folder}/2"])
    lines = [
        f"{text} --batch_size 2 --output_dir {folder}/1",
        f"{text} --batch_size 2 --output_dir {folder}/resumed --num_samples 0 --train_num_steps 2",
        f"{text} --batch_size 2 --output_dir {folder}/resumed --num_samples 0",
        f"{short} --output_dir {folder}/tokens --model {models['tokens']} --first_frame",
        f"{short} --output_dir {folder}/low --model {models['image']} --expert low --no_gradient_checkpointing",
        f"--dataset_path {clips} {SIZE} --model {models['text']} --lora_rank 0 --train_num_steps 1 --num_samples 0"
        f" --output_dir {folder}/all",
    ]
    train(lines)
    return folder


def test_the_run_is_the_same_on_one_and_two_processes(runs: Path) -> None:
    one = losses(runs / "1")
    assert list(one) == [1, 2, 3, 4]
    assert losses(runs / "2") == pytest.approx(one, rel=1e-4)


def test_it_resumes_byte_equal(runs: Path) -> None:
    assert_same_bytes(runs / "1", runs / "resumed", 4)


def test_a_checkpoint_of_two_processes_has_the_trained_weights_unwrapped(runs: Path) -> None:
    weights = load_file(runs / "2/checkpoints/step_00000004/model.safetensors")
    assert weights
    assert all(name.startswith("transformer.blocks.") and "lora" in name for name in weights), "frozen, or wrapped"


def test_clips_are_sampled_beside_the_training_clips(runs: Path) -> None:
    """Both processes sample a share of three clips, and the main process writes the files."""
    with Image.open(runs / "2/samples/step_00000004.png") as sheet:
        assert sheet.size == (8 * 32, 3 * 2 * 32)
        training = sheet.crop((0, 0, 8 * 32, 32))
    frames = find_clips_of(runs)[0].decode(9, 32, 32, 24)
    assert list(training.crop((0, 0, 32, 32)).getdata()) == [tuple(p) for p in frames[0].flatten(1).T.tolist()]
    video = Clip(runs / "2/samples/step_00000004.mp4", "")
    assert video.decode(9, 32, 96, 24).shape == (9, 3, 32, 96)
    assert json.loads((runs / "2/sampled_clips.jsonl").read_text().splitlines()[-1])["clips"] == 3


def find_clips_of(runs: Path) -> list[Clip]:
    """Return the clips that the runs were trained on."""
    document = json.loads((runs / "1/config.json").read_text())
    return find_clips(Path(document["training"]["dataset_path"]))


@pytest.mark.parametrize("run", ["tokens", "low"])
def test_clips_are_sampled_from_a_first_frame(runs: Path, run: str) -> None:
    """The tiny autoencoders are random, so that the first frame is recognised by nobody; but the files are there."""
    with Image.open(runs / run / "samples/step_00000001.png") as sheet:
        assert sheet.size == (8 * 32, 2 * 32)
    assert (runs / run / LORA).exists()


@pytest.mark.parametrize(("run", "kind", "part"), [("1", "text", "transformer"), ("low", "image", "transformer_2")])
def test_a_saved_lora_changes_the_pipeline_by_what_was_trained(
    runs: Path, models: dict[Kind, Path], run: str, kind: Kind, part: str
) -> None:
    """Load a LoRA whose alpha, which only the file carries, is not its rank, into the expert of the run."""
    flags = "--lora_rank 4 --lora_alpha 8" + " --expert low" * (kind == "image")
    wan = wan_of(models[kind], runs, flags)
    assert wan.expert == part
    channels = 36 if kind == "image" else 16
    inputs = torch.randn(2, channels, 3, 4, 4), torch.tensor([900.0, 100.0]), torch.randn(2, 7, 32)
    pipeline: Any = wan.pipeline
    pipeline.register_modules(transformer=wan.load_transformer("transformer", torch.float32))
    if part == "transformer_2":
        pipeline.register_modules(transformer_2=wan.load_transformer(part, torch.float32))
    changed = getattr(pipeline, part)
    trained = wan.trained_transformer()
    weights = load_file(checkpoint.list_checkpoints(runs / run / "checkpoints")[-1] / "ema.safetensors")
    trained.load_state_dict({name.removeprefix("transformer."): each for name, each in weights.items()}, strict=False)
    with torch.no_grad():
        before = changed(*inputs, return_dict=False)[0]
        pipeline.load_lora_weights(runs / run / LORA, load_into_transformer_2=part == "transformer_2")
        after = changed(*inputs, return_dict=False)[0]
        expected = trained(*inputs, return_dict=False)[0]
    assert (after - before).norm() > 1e-4 * before.norm(), "nothing was learned"
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def test_all_weights_are_trained_and_saved_as_a_transformer(runs: Path, models: dict[Kind, Path]) -> None:
    before = diffusers.WanTransformer3DModel.from_pretrained(models["text"], subfolder="transformer").state_dict()
    after = diffusers.WanTransformer3DModel.from_pretrained(runs / "all/transformer").state_dict()
    averaged = load_file(runs / "all/checkpoints/step_00000001/ema.safetensors")
    assert {name.removeprefix("transformer.") for name in averaged} == before.keys()
    for name, values in after.items():
        assert torch.equal(values, averaged[f"transformer.{name}"]), name
    changed = sum(not torch.equal(values, before[name]) for name, values in after.items())
    assert changed > 0.8 * len(after)


def test_clips_are_encoded_as_the_pipeline_does(models: dict[Kind, Path], clips: Path, tmp_path: Path) -> None:
    wan, found = wan_of(models["image"], clips, f"--cache_dir {tmp_path} --expert low"), find_clips(clips)
    dataset = encode_clips(wan, found, PartialState())
    assert len(dataset) == 5
    item = dataset.read_batch([3])
    assert {name: values.shape[1:] for name, values in item.items()} == {
        "latents": (1, 2, 16, 3, 4, 4),
        "text": (512, 32),
        "given": (20, 3, 4, 4),
    }
    pipeline = wan.load_pipeline(with_text=True)
    text, empty = pipeline.encode_prompt(found[3].caption, negative_prompt="", max_sequence_length=512)
    torch.testing.assert_close(item["text"].float(), text, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(dataset.empty[None], empty, atol=2e-3, rtol=1e-3)
    pixels = found[3].decode(9, 32, 32, 24).float().permute(1, 0, 2, 3)[None] / 127.5 - 1
    expected = wan.vae.encode(pixels).latent_dist
    torch.testing.assert_close(item["latents"][:, 0, 0].float(), expected.mean, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(item["latents"][:, 0, 1].float(), expected.std, atol=2e-3, rtol=1e-3)
    mean, std = (torch.tensor(each)[:, None, None, None] for each in (wan.space.mean, wan.space.std))
    torch.testing.assert_close(wan.space.encode(item["latents"]), (item["latents"][:, 0, 0].float() - mean) / std)
    alone = torch.cat((pixels[:, :, :1], torch.zeros_like(pixels[:, :, 1:])), dim=2)
    given = (wan.vae.encode(alone).latent_dist.mean - mean) / std
    torch.testing.assert_close(item["given"][:, 4:].float(), given, atol=2e-3, rtol=1e-3)
    assert item["given"][:, :4, 0].eq(1).all()
    assert item["given"][:, :4, 1:].eq(0).all()


def test_clips_are_encoded_once_and_a_run_accepts_copies(
    models: dict[Kind, Path], clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied clips are encoded again, since their files are newer; but they are the same data for a run."""

    def encoded(folder: Path, model: Path = models["text"]) -> Any:
        wan = wan_of(model, folder, f"--cache_dir {tmp_path}/cache")
        return encode_clips(wan, find_clips(folder)[-1:], PartialState())

    copied = shutil.copytree(clips, tmp_path / "copied", copy_function=shutil.copyfile)
    first, second = encoded(clips), encoded(copied)
    assert first.path != second.path
    assert first.fingerprint == second.fingerprint
    (copied / "frames/caption.txt").write_text("another")
    assert encoded(copied).fingerprint != first.fingerprint
    other = shutil.copytree(models["text"], tmp_path / "other")
    assert encoded(clips, other).path != first.path, "another autoencoder"
    monkeypatch.setattr(Clip, "decode", lambda *_: pytest.fail("the clips are encoded already"))
    assert encoded(clips).path == first.path


@pytest.mark.parametrize("flags", ["--lora_alpha 4", "--time_shift 1"])
def test_a_run_does_not_resume_as_another(runs: Path, models: dict[Kind, Path], clips: Path, flags: str) -> None:
    """Nothing in the weights would tell."""
    words = f"--model {models['text']} --dataset_path {clips} {FLAGS} --batch_size 2 --output_dir {runs}/1"
    with pytest.raises(UsageError, match=rf"was trained with {flags.split(maxsplit=1)[0]} .*, and this run has"):
        example.check_same_run(flags_of(f"{words} {flags}"))
    example.check_same_run(flags_of(f"{words} --caption_dropout 0.3"))


def test_a_finished_run_writes_a_missing_lora_and_a_damaged_checkpoint_does_not_block_it(
    runs: Path, models: dict[Kind, Path], clips: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "resumed", tmp_path / "again")
    (tmp_path / "again" / LORA).unlink()
    words = f"--model {models['text']} --dataset_path {clips} {FLAGS} --batch_size 2 --num_samples 0"
    train([f"{words} --output_dir {tmp_path}/again"])
    # The order of a set in the header of the file differs between processes.
    written, expected = (load_file(folder / LORA) for folder in (tmp_path / "again", runs / "1"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    (tmp_path / "again/checkpoints/step_00000004/config.json").write_text("{")
    train([f"{words} --output_dir {tmp_path}/again"])
    assert_same_bytes(runs / "1", tmp_path / "again", 4)


def test_bad_input(models: dict[Kind, Path], clips: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("vace", "partless", "vision"):
        shutil.copytree(models["text"], tmp_path / name)
    shutil.rmtree(tmp_path / "partless/transformer")
    shutil.rmtree(shutil.copytree(models["text"], tmp_path / "blind") / "vae")
    for name, before, after in (
        ("vace", '"WanTransformer3DModel"', '"WanVACETransformer3DModel"'),
        ("vision", '"image_dim": null', '"image_dim": 8'),
    ):
        settings = tmp_path / name / "transformer/config.json"
        settings.write_text(settings.read_text().replace(before, after))
    text = f"--model {models['text']} --output_dir {tmp_path}/run {SIZE}"
    two = f"{text} --model {models['experts']}"
    cases = {
        f"{text} --dataset_path {tmp_path}/none": "is not a folder",
        f"{text} --dataset_path {clips} --frames 13": "has 9 frames",
        f"{text} --dataset_path {clips} --frames 8": "--frames is 8; it must be 1 more than a multiple of 4",
        f"{text} --dataset_path {clips} --height 24": "--height is 24; it must be a multiple of 16",
        f"{text} --dataset_path {clips} --first_frame": "--first_frame needs an image-to-video model, or a model with",
        f"{text} --dataset_path {clips} --expert low": "has one transformer for all noise levels: leave out --expert",
        f"{two} --dataset_path {clips}": "has two experts: pass --expert high or --expert low",
        f"{text} --dataset_path {clips} --model {tmp_path}/empty": "cannot be loaded",
        f"{text} --dataset_path {clips} --model {tmp_path}/partless": "has no transformer",
        f"{text} --dataset_path {clips} --model {tmp_path}/blind": "the vae of --model",
        f"{text} --dataset_path {clips} --model {tmp_path}/vace": "is a WanVACETransformer3DModel",
        f"{text} --dataset_path {clips} --model {tmp_path}/vision": "image encoder, as Wan 2.1 does",
        f"{text} --dataset_path {clips} --output_dir {clips}/run": "lies inside --dataset_path",
        f"{text} --dataset_path {clips} --lora_rank 0 --lora_alpha 2": "--lora_alpha has no effect",
    }
    for words, sentence in cases.items():
        with pytest.raises(UsageError) as caught:
            train([words])
        assert sentence in str(caught.value)


def test_all_weights_that_do_not_fit_are_refused(
    models: dict[Kind, Path], clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wan_pipeline.free_memory", lambda: 1000)
    with pytest.raises(UsageError, match=r"--lora_rank 0 needs at least .* GB for .* weights, .*: pass a rank"):
        train([f"--model {models['text']} --dataset_path {clips} {SIZE} --lora_rank 0 --output_dir {tmp_path}"])


def test_a_lora_of_the_users_is_refused_before_the_clips_are_read(models: dict[Kind, Path], tmp_path: Path) -> None:
    (tmp_path / LORA).write_text("mine")
    with pytest.raises(UsageError, match=r"would be overwritten, and this project did not write it"):
        train([f"--model {models['text']} --dataset_path {tmp_path}/none --output_dir {tmp_path} {FLAGS}"])
    assert (tmp_path / LORA).read_text() == "mine"


def test_the_command_of_the_mission_is_parsed() -> None:
    """The defaults are those of TI2V-5B, and the epochs take the place of the default number of steps."""
    flags = flags_of("--dataset_path clips --batch_size 1 --num_epochs 50 --learning_rate 1e-4 --num_workers 8")
    assert flags.wan.model == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    assert flags.run.total_steps(flags.run.split_batch(4), dataset_length=8) == 100
