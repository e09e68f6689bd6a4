"""Tests of sounds, a custom kind of data, beyond the programs of tests/contract."""

import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rectified_flow.data.open import space_of_folder
from tests.contract.kinds import SCHEDULE, Runs, words
from tests.extension.own_sounds import Spectrograms, read_sound
from tests.programs import program
from tests.ranks import run_on_ranks

RATE = 8000


def write_tone(path: Path, hertz: int, rate: int = RATE) -> None:
    """Write a tone of half of full scale."""
    phase = 2 * np.pi * hertz * np.arange(rate // 4) / rate
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((16384 * np.sin(phase)).astype("<i2").tobytes())


@pytest.fixture
def runs(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("own sounds")


def test_samples_start_from_sounds(runs: Runs, tmp_path: Path) -> None:
    first = min(runs.data.glob("sounds/*.wav"))
    flags = f"--num_samples 2 --steps 2 --from_images {first} --strength 0.5"
    assert runs.call("sample.py", flags, tmp_path) == ""
    rate, samples = read_sound(tmp_path / "00001.wav")
    assert (rate, len(samples)) == (read_sound(first)[0], 7 * 4)
    assert samples.std() > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--augment 0.1", "--augment has no effect on Spectrograms"),
        ("--image_size 0", "--image_size 0 is for pictures"),
        ("--dataset_path {data}/mixed", "z.wav (it has 16000 samples a second, not"),
    ],
)
def test_what_it_does_not_have_is_refused(runs: Runs, tmp_path: Path, flags: str, sentence: str) -> None:
    shutil.copytree(runs.data / "sounds", tmp_path / "mixed")
    write_tone(tmp_path / "mixed/z.wav", 440, rate=16000)
    given = f"{runs.kind.flags.format(data=runs.data)} {SCHEDULE.replace('--augment 0', '')} {flags}"
    line = words(runs.kind, given, tmp_path, tmp_path / "x")
    [(code, errors)] = run_on_ranks(1, program, "train_oxford.py", line)
    assert code == 2
    assert sentence in errors
    assert "Traceback" not in errors


def test_a_sound_is_heard_again_in_its_spectrogram(tmp_path: Path) -> None:
    write_tone(tmp_path / "tone.wav", 1000)
    assert space_of_folder(tmp_path) == "Spectrograms"
    space = Spectrograms((1, 32, 32), RATE)
    spectrogram = space.read(tmp_path / "tone.wav")
    assert spectrogram.max().item() == pytest.approx(np.log10(0.5), abs=0.05), "half of full scale"
    assert spectrogram[0].mean(dim=1).argmax() == round(1000 * 64 / RATE)
    (tmp_path / "again.wav").write_bytes(space.write(spectrogram))
    again = space.read(tmp_path / "again.wav")
    assert (10**again - 10**spectrogram).abs().mean() < 0.2 * (10**spectrogram).mean()
