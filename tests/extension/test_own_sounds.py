"""A kind of data of one's own: every program takes a folder of sounds, and writes sounds."""

import json
import shutil
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.data.open import space_of_folder
from rectified_flow.load import load_flow
from tests.extension.own_sounds import Spectrograms, read_sound
from tests.programs import assert_refused, program
from tests.ranks import run_on_ranks

IMPORT = "--import tests.extension.own_sounds"
LAST = "checkpoints/step_00000008"
RATE = 8000


def write_sounds(folder: Path, rate: int = RATE) -> None:
    """Write tones of 200 to 2,100 Hz."""
    folder.mkdir(parents=True)
    for number in range(20):
        phase = 2 * np.pi * (200 + 100 * number) * np.arange(rate // 4) / rate
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes((16384 * np.sin(phase)).astype("<i2").tobytes())


def train(folder: Path, output_dir: Path, more: str = "") -> str:
    return (
        f"--dataset_path {folder} --cache_dir {folder}-cache --image_size 8 --dim 8 --dim_mults 1 {more} {IMPORT}"
        " --global_batch_size 8 --learning_rate 1e-2 --lr_warmup_steps 2 --train_num_steps 8 --save_every 4"
        f" --num_samples 3 --sample_steps 2 --output_dir {output_dir}"
    )


def call(name: str, flags: str) -> None:
    [(code, errors)] = run_on_ranks(1, program, name, flags.split())
    assert code == 0, errors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, beside its folder of sounds."""
    folder = tmp_path_factory.mktemp("sounds")
    write_sounds(folder / "tones")
    call("train_oxford.py", train(folder / "tones", folder / "run"))
    return folder / "run"


def test_it_resumes_byte_equal(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / LAST)
    call("train_oxford.py", train(run.parent / "tones", tmp_path / "run"))
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "run" / LAST / name).read_bytes() == (run / LAST / name).read_bytes()


def test_samples_are_sounds_beside_their_pictures(run: Path, tmp_path: Path) -> None:
    flags = f"--checkpoint {run} --num_samples 2 --steps 2 --from_images {run.parent}/tones/03.wav --strength 0.5"
    call("sample.py", f"{flags} {IMPORT} --output_dir {tmp_path}/samples")
    rate, samples = read_sound(tmp_path / "samples/00001.wav")
    space = load_flow(run).space
    assert isinstance(space, Spectrograms)
    assert (rate, len(samples)) == (RATE, 7 * 4)
    assert samples.std() > 0
    assert Image.open(tmp_path / "samples/00001-preview.png").size == (8, 8)


def test_it_is_evaluated_by_its_pictures_and_teaches_a_one_step_model(run: Path, tmp_path: Path) -> None:
    call(
        "evaluate.py",
        f"--checkpoint {run} --num_samples 4 --steps 2 --feature_network efficientnet_lite0 {IMPORT}"
        f" --output_dir {tmp_path}",
    )
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    assert np.isfinite(list(result["distances"].values())).all()
    flags = f"--teacher {run} --teacher_samples 16 --teacher_steps 2 --global_batch_size 8 --train_num_steps 2"
    call("train_mean_flow.py", f"{flags} --num_samples 0 --output_dir {tmp_path}/map {IMPORT}")


def test_what_it_does_not_have_is_refused(run: Path, tmp_path: Path) -> None:
    tones = run.parent / "tones"
    write_sounds(tmp_path / "mixed", rate=16000)
    shutil.copy(tones / "00.wav", tmp_path / "mixed")
    for name, flags, sentence in (
        ("train_oxford.py", train(tones, tmp_path / "x", "--augment 0.1"), "--augment has no effect on Spectrograms"),
        ("train_oxford.py", train(tones, tmp_path / "x", "--native_size"), "--native_size is for pictures"),
        (
            "train_oxford.py",
            train(tmp_path / "mixed", tmp_path / "x"),
            "01.wav (it has 16000 samples a second, not 8000)",
        ),
        ("export.py", f"--checkpoint {run} --output_dir {tmp_path}/x {IMPORT}", "has a flow of spectrograms"),
    ):
        assert_refused(name, 1, flags, sentence)


def test_a_sound_is_heard_again_in_its_spectrogram(tmp_path: Path) -> None:
    write_sounds(tmp_path / "tones")
    assert space_of_folder(tmp_path / "tones") == "Spectrograms"
    space = Spectrograms((1, 32, 32), RATE)
    spectrogram = space.read(tmp_path / "tones/08.wav")
    assert spectrogram.max().item() == pytest.approx(np.log10(0.5), abs=0.05), "half of full scale"
    assert spectrogram[0].mean(dim=1).argmax() == round(1000 * 64 / RATE)
    (tmp_path / "again.wav").write_bytes(space.write(spectrogram))
    again = space.read(tmp_path / "again.wav")
    assert (10**again - 10**spectrogram).abs().mean() < 0.2 * (10**spectrogram).mean()
