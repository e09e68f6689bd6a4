"""Tests of the measure of copies on latents: a flow copies what its autoencoder leaves of a picture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from rectified_flow.cli.sample import Outputs, _write_nearest
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.latents.autoencoders import Small
from rectified_flow.latents.space import Latents
from rectified_flow.system.pictures import write_picture

SIDE, COUNT, HELD_OUT = 64, 60, 12


def test_copies_are_compared_with_reconstructions(tmp_path: Path) -> None:
    """Reconstructions of the training pictures are copies, also mirrored or noisy; those of other pictures are not."""
    pictures = ImageDataset(open_store(SyntheticFlowers(SIDE, count=COUNT), SIDE, cache_dir=tmp_path))
    training, unseen = (pictures.subset(range(*span)) for span in ((COUNT - HELD_OUT,), (COUNT - HELD_OUT, COUNT)))
    medium = Latents(Small(), SIDE).medium
    how: dict[str, Any] = {"num_samples": 8, "held_out": unseen, "metrics": ("copies",), "medium": medium}
    evaluator = Evaluator(training, "efficientnet_lite0", **how)
    copied = medium.reconstructed(training.read_pictures(range(len(training))))
    noise = 4 * torch.randn(copied.shape, generator=torch.Generator().manual_seed(0))
    noisy = (copied + noise).round().clamp(0, 255).to(torch.uint8)
    shares = [evaluator.compute(evaluator.extract(each))["copies"] for each in (copied, copied.flip(-1), noisy)]
    assert min(shares) >= 0.99
    assert evaluator.real.copies_by_chance is not None
    assert evaluator.real.copies_by_chance <= 0.1
    features = sorted(path.name for path in tmp_path.glob("[!.]*-features-*"))
    assert len(features) == 4, "two networks, of the pictures and of their reconstructions"


def test_the_nearest_pictures_are_those_whose_reconstructions_are_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample that is the reconstruction of a training picture is at no distance from it."""
    pictures = ImageDataset(open_store(SyntheticFlowers(SIDE, count=COUNT), SIDE, cache_dir=tmp_path))
    medium = Latents(Small(), SIDE).medium
    [sample] = medium.reconstructed(pictures.read_pictures([7]))
    write_picture(tmp_path / "0.png", sample.permute(1, 2, 0).numpy())
    request: Any = None  # the sheet does not need it
    sheet = tmp_path / "nearest.png"
    _write_nearest(pictures, Outputs(tmp_path, request, medium, None, ["0"], sheet, sheet), PartialState())
    assert f"{sheet}, the smallest distance is 0.0 of 256 grey levels" in capsys.readouterr().out
