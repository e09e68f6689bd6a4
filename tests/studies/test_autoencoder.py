"""Tests of the study of the small autoencoder: the split of its pictures, and resumed training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from PIL import Image

from studies import autoencoder_data
from studies.autoencoder import Flags, sharpen, to_pictures, train
from studies.autoencoder_data import SIDE, Source, build, crop_drawing, crop_photograph, draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of a drawing, a photograph and pictures drawn by program, and a short training on them."""
    folder = tmp_path_factory.mktemp("autoencoder")
    Image.new("RGBA", (200, 90), (255, 0, 0, 128)).save(folder / "drawing.png")
    draw(default_rng(0), 300).save(folder / "photograph.jpg")
    sources = {
        "drawing": Source("CC0", [folder / "drawing.png"], 2, crop_drawing, splits=False),
        "photograph": Source("CC0", [folder / "photograph.jpg"], 2, crop_photograph, splits=False),
        "drawn": Source("none", list(range(40)), 1, crop_photograph),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoder_data, "open_sources", lambda *_: sources)
        build(folder, folder, folder)
    return folder


def flags_of(folder: Path, minutes: float) -> Flags:
    return Flags(folder, folder, folder, folder, minutes, sharpen_minutes=minutes, batch_size=2)


def test_crops_of_a_picture_are_all_in_one_part(folder: Path) -> None:
    training, held_out = (np.load(folder / f"{part}.npy") for part in ("training", "held_out"))
    assert training.shape[1:] == (SIDE, SIDE, 3)
    assert len(training) + len(held_out) == 2 + 2 + 40
    assert 0 < len(held_out) < 10
    assert not any((training == each).all(axis=(1, 2, 3)).any() for each in held_out)


@pytest.mark.slow
def test_a_training_resumes_and_the_sharpened_encoder_stays(folder: Path) -> None:
    crops = np.load(folder / "training.npy")
    train(crops, flags_of(folder, 0.01))
    first = torch.load(folder / "checkpoint.pt", weights_only=True)
    trained = train(crops, flags_of(folder, 0.02))
    second = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert 0 < first["step"] < second["step"]
    assert first["seconds"] < second["seconds"] < 10
    sharpened = sharpen(trained, crops, flags_of(folder, 0.01))
    pictures = to_pictures(crops[:2])
    torch.testing.assert_close(sharpened.encode(pictures), trained.encode(pictures))
    assert not torch.equal(sharpened.decode(trained.encode(pictures)), trained.decode(trained.encode(pictures)))
