"""Tests of runs on latents, which any number of processes encodes once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from rectified_flow.data import store_writer
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.latents.autoencoders import PretrainedAutoencoder, Small, _load
from rectified_flow.latents.space import LatentDataset, Latents, encode_pictures
from rectified_flow.networks.pretrained import hash_of
from rectified_flow.system.pictures import fit
from tests.contract.kinds import Runs
from tests.extension.own_autoencoder import Haar
from tests.latents.tiny_autoencoders import save_tiny
from tests.programs import assert_refused, program
from tests.ranks import run_on_ranks
from tests.training.runs import losses, tiny_dataset

SMALL = "--dim 8 --dim_mults 1 2 --dropout 0 --lr_warmup_steps 0 --log_every 1 --num_samples 4 --sample_steps 2"


def encode(pictures: ImageDataset, *, mirrored: bool = True) -> LatentDataset:
    """The latents of pictures; called on every rank."""
    return encode_pictures(pictures, Haar(1), mirrored=mirrored)


def run(name: str, flags: str) -> str:
    """Run a program, which must end with code 0, and return its messages."""
    [(code, text)] = run_on_ranks(1, program, name, flags.split())
    assert code == 0, text
    return text


def save_pictures(folder: Path, side: int) -> Path:
    """Write 20 noisy pictures of two classes."""
    pixels = np.random.default_rng(0).integers(256, size=(20, side, side, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        (folder / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(each).save(folder / str(number % 2) / f"{number}.png")
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> ImageDataset:
    return tiny_dataset(tmp_path / "cache")


def test_latents_are_those_of_the_pictures_and_their_mirror_images(pictures: ImageDataset) -> None:
    latents, space = encode(pictures), Latents(Haar(1), 8)
    batch, images = latents.read_batch([0, 45, 7]), torch.from_numpy(pictures.entries["images"][[0, 45, 7]])
    assert set(batch) == {"latents", "labels"}
    assert (batch["latents"].dtype, batch["latents"].shape) == (torch.float16, (3, 2, 1, 12, 4, 4))
    for variant, expected in enumerate((images, images.flip(-1))):
        decoded = space.medium.render(space.decode(space.encode(batch["latents"][:, variant : variant + 1])))
        assert torch.equal(decoded, expected)
    assert torch.equal(batch["labels"], pictures.read_batch([0, 45, 7])["labels"])
    assert latents.fingerprint == pictures.fingerprint
    assert latents.description == f"{pictures.description}, as latents of 12 x 4 x 4 by haar"


def test_channels_are_scaled_by_what_was_measured(pictures: ImageDataset) -> None:
    latents = encode(pictures)
    space = latents.space
    x = space.encode(latents.read_batch(range(46))["latents"])
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(12), atol=1e-3, rtol=0)
    torch.testing.assert_close(x.std(dim=(0, 2, 3), correction=0), torch.ones(12), atol=1e-3, rtol=0)


def test_the_spread_of_a_distribution_is_part_of_its_scale(pictures: ImageDataset, tmp_path: Path) -> None:
    autoencoder = PretrainedAutoencoder(str(save_tiny("AutoencoderKL", tmp_path / "vae")))
    latents = encode_pictures(pictures, autoencoder, mirrored=False)
    stored = latents.read_batch(range(46))["latents"]
    assert stored.shape == (46, 1, 2, 4, 4, 4)
    expected = (
        stored[:, 0, 0].double().var(dim=(0, 2, 3), correction=0) + stored[:, 0, 1].double().square().mean((0, 2, 3))
    ).sqrt()
    np.testing.assert_allclose(latents.space.std, expected, rtol=1e-3)  # type: ignore[attr-defined]
    space = latents.space
    x = torch.cat([space.encode(space.augment(stored)[0]) for _ in range(20)])
    torch.testing.assert_close(x.std(dim=(0, 2, 3)), torch.ones(4), atol=0.05, rtol=0)


def test_two_processes_encode_the_same_once(pictures: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run_on_ranks(2, encode, pictures)
    assert together[0].path == together[1].path
    first = (together[0].path / "latents.float16").read_bytes()
    monkeypatch.setattr(StoreWriter, "prepare", None)
    again = encode(pictures)
    assert again.info == together[0].info
    monkeypatch.undo()
    shutil.rmtree(again.path)
    alone = encode(pictures)
    assert (alone.path / "latents.float16").read_bytes() == first
    assert alone.info == again.info
    plain = encode(pictures, mirrored=False)
    assert (plain.info.space, plain.info.framing) == (alone.info.space, pictures.info.framing)
    assert plain.read_batch([1])["latents"].shape == (1, 1, 1, 12, 4, 4)


def test_another_run_that_encodes_is_waited_for(pictures: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    path = encode(pictures).path
    shutil.rmtree(path)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    lock.acquire()

    def wait(text: str) -> None:
        assert text == f"another run is writing the latents {path}: waiting until it ends"
        lock.release()

    monkeypatch.setattr(store_writer, "LOCK_TIMEOUT", 0)
    monkeypatch.setattr(store_writer, "warn_once", wait)
    assert encode(pictures).path == path


def test_other_pictures_or_weights_have_other_latents(tmp_path: Path, pictures: ImageDataset) -> None:
    autoencoders = [save_tiny("AutoencoderKL", tmp_path / str(seed), seed) for seed in (0, 1)]
    paths = {
        encode_pictures(each, PretrainedAutoencoder(str(autoencoder)), mirrored=False).path.name[-16:]
        for each in (pictures, tiny_dataset(tmp_path / "cache", 40))
        for autoencoder in autoencoders
    }
    assert len(paths) == 4


def test_a_picture_is_varied(kind_runs: Callable[[str], Runs], tmp_path: Path) -> None:
    runs = kind_runs("latents")
    flags = "--from_images {data}/pictures/a/00.png --strength 0.001 --num_samples 1"
    assert runs.call("sample.py", flags, tmp_path) == ""
    picture = torch.tensor(np.asarray(fit(Image.open(runs.data / "pictures/a/00.png"), (32, 16)))).permute(2, 0, 1)
    decoded = Small().decode(Small().encode(picture[None] / 127.5 - 1)[0])[0]
    varied = torch.tensor(np.asarray(Image.open(tmp_path / "00000.png"))).permute(2, 0, 1)
    assert (varied / 127.5 - 1 - decoded.clamp(-1, 1)).abs().mean() < 2 / 127.5


@pytest.mark.parametrize("method", ["reflow", "distill"])
def test_a_teacher_of_latents_needs_no_pixels(kind_runs: Callable[[str], Runs], tmp_path: Path, method: str) -> None:
    """The drawn latents have the scales of the teacher, and a run on them needs the teacher no longer."""
    teacher = shutil.copytree(kind_runs("latents").one, tmp_path / "teacher")
    before = json.loads((teacher / "config.json").read_text())
    more = f"--method {method} --teacher {teacher} --teacher_samples 20 --teacher_steps 2 --batch_size 10"
    more += f" --num_samples 0 --log_every 2 --output_dir {tmp_path}/run --train_num_steps"
    for steps in (2, 4):
        run("train_mean_flow.py", f"{more} {steps}")
        shutil.rmtree(teacher, ignore_errors=True)
    assert list(losses(tmp_path / "run")) == [2, 4]
    [files] = [sorted(path.name for path in folder.iterdir()) for folder in tmp_path.glob("run/pa*s")]
    assert "latents.float16" in files
    assert "images.uint8" not in files
    after = json.loads((tmp_path / "run/config.json").read_text())
    scales = [[made["flow"]["space"][name] for name in ("shape", "mean", "std")] for made in (before, after)]
    assert scales[0] == scales[1]


def moved_autoencoder(folder: Path) -> list[tuple[int, str]]:
    """Train a one-step flow on latents, move the autoencoder, and sample without it, with another one and with it."""
    vae, moved, other = save_tiny("AutoencoderKL", folder / "vae"), folder / "moved", folder / "other"
    save_tiny("AutoencoderKL", other, seed=1)
    flags = f"--dataset_path {folder}/pictures --image_size 32 --autoencoder {vae} {SMALL}"
    flags += f" --batch_size 4 --train_num_steps 2 --output_dir {folder}/run"
    ended = [program("train_mean_flow.py", flags.split())]
    vae.rename(moved)
    for remembered in (_load, hash_of):
        remembered.cache_clear()
    for more in ("", f"--autoencoder {other}", f"--autoencoder {moved}"):
        ended.append(program("sample.py", f"--checkpoint {folder}/run --num_samples 2 {more}".split()))
    return ended


def test_an_autoencoder_of_diffusers_may_move_but_not_change(tmp_path: Path) -> None:
    save_pictures(tmp_path / "pictures", 32)
    [((code, text), gone, changed, (again, errors))] = run_on_ranks(1, moved_autoencoder, tmp_path)
    assert (code, again) == (0, 0), text + errors
    assert (gone[0], changed[0]) == (2, 2)
    assert f"--autoencoder {tmp_path}/vae cannot be found" in gone[1]
    assert "differs from the one used in training" in changed[1]
    assert Image.open(tmp_path / "run/generated/00001.png").size == (32, 32)


def test_an_autoencoder_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    save_pictures(tmp_path / "pictures", 8)
    words = f"--image_size 8 --autoencoder no/such-autoencoder {SMALL} --dataset_path {tmp_path}/pictures"
    words += f" --output_dir {tmp_path}/run"
    sentence = "error: --autoencoder no/such-autoencoder cannot be found ("
    assert_refused("train_oxford.py", 1, f"{words} --dry_run", sentence, HF_ENDPOINT="http://localhost:9")
    assert not (tmp_path / "run").exists()
