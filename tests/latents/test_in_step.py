"""Tests of latents of stored pictures that each training step augments and encodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rectified_flow.cli.data import build_space
from rectified_flow.cli.record import recorded_space
from rectified_flow.cli.training_flags import DataConfig
from rectified_flow.data.store import ImageDataset
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.latents.autoencoders import Small
from rectified_flow.latents.in_step import LatentsInStep
from rectified_flow.latents.space import Latents, encode_pictures
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.space import variant_conditions, with_augmentation
from tests.extension.own_autoencoder import Haar
from tests.ranks import run_on_ranks
from tests.training.runs import tiny_dataset

COUNT, SIDE = 32, 8


@pytest.fixture
def pictures() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (COUNT, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)


@pytest.fixture
def dataset(tmp_path: Path) -> ImageDataset:
    return tiny_dataset(tmp_path / "cache")


def drawn(space: LatentsInStep, images: Tensor, index: slice = slice(None), **more: Tensor) -> tuple[Any, ...]:
    """Return data, noise and conditions of a step on rows of a batch of pictures."""
    network = Unet(8, (1,), conditions=variant_conditions(space), channels=12, image_size=4)
    flow = RectifiedFlow(network, space=space, from_source="source" in more)
    with deterministic(BatchRows(0, 3, COUNT, index)):
        return flow.draw_batch({"images": images[index]} | {name: each[index] for name, each in more.items()})


def test_the_latents_are_those_of_a_store(dataset: ImageDataset) -> None:
    stored = encode_pictures(dataset, Small(), mirrored=False)
    space = LatentsInStep(Small(), SIDE, mean=stored.space.mean, std=stored.space.std)  # type: ignore[attr-defined]
    x = space.encode(space.augment(dataset.read_batch(range(46))["images"])[0])
    torch.testing.assert_close(x, stored.space.encode(stored.read_batch(range(46))["latents"]), atol=5e-3, rtol=0)


def test_augmentation_changes_the_latents_and_is_described(pictures: Tensor) -> None:
    space = LatentsInStep(Haar(1), SIDE)
    plain, _, conditions = drawn(space, pictures)
    assert conditions == {}
    assert torch.equal(plain, space.encode(pictures))
    x, _, conditions = drawn(with_augmentation(space, 0.2), pictures)
    changed = (conditions["augmentation"] != 0).any(dim=1)
    assert 0 < changed.sum() < COUNT
    assert torch.equal((x != plain).flatten(1).any(dim=1), changed)
    some, _, numbers = drawn(with_augmentation(space, 0.2), pictures, slice(1, None, 2))
    torch.testing.assert_close(some, x[1::2])
    assert torch.equal(numbers["augmentation"], conditions["augmentation"][1::2]), "whichever rows are present"


def test_half_of_the_pictures_are_mirrored_before_they_are_encoded(pictures: Tensor) -> None:
    space = LatentsInStep(Haar(1), SIDE, horizontal_flip=True)
    x = drawn(space, pictures)[0]
    kept, mirrored = ((x == space.encode(variant)).flatten(1).all(dim=1) for variant in (pictures, pictures.flip(-1)))
    assert torch.equal(kept, ~mirrored)
    assert 0 < mirrored.sum() < COUNT


def test_a_random_part_is_encoded_in_training_and_the_centre_otherwise(pictures: Tensor) -> None:
    space = LatentsInStep(Haar(1), SIDE - 2)
    parts = [pictures[..., top : top + 6, left : left + 6] for top in range(3) for left in range(3)]
    x = drawn(space, pictures)[0]
    found = torch.stack([(x == space.encode(part)).flatten(1).all(dim=1) for part in parts])
    assert torch.equal(found.sum(dim=0), torch.ones(COUNT, dtype=torch.long))
    assert len(found.any(dim=1).nonzero()) > 1
    assert torch.equal(space.encode(pictures), space.encode(parts[4]))


def test_a_source_is_augmented_like_its_target(pictures: Tensor) -> None:
    space = LatentsInStep(Haar(1), SIDE - 2, horizontal_flip=True, augmentation=0.3)
    x, start, _ = drawn(space, pictures, source=pictures)
    assert torch.equal(x, start)
    assert not torch.equal(x, space.encode(pictures))


def test_stored_pictures_are_decoded_latents(pictures: Tensor) -> None:
    space = LatentsInStep(Haar(1), SIDE, mean=[0.1] * 12, std=[0.5] * 12)
    assert torch.equal(space.to_stored(space.encode(pictures)), pictures)
    again = build(describe(with_augmentation(space, 0.1)))
    assert (again.augmentation, again.mean, again.shape) == (0.1, space.mean, space.shape)


def scaled(dataset: ImageDataset) -> tuple[list[float], list[float]]:
    """Return the scale of the latents of pictures; called on every rank."""
    rows, space = LatentsInStep(Haar(1), SIDE).medium.rows(dataset, mirrored=True)
    assert rows is dataset
    assert isinstance(space, LatentsInStep)
    return space.mean, space.std


def test_the_scale_is_measured_alike_on_any_number_of_ranks(dataset: ImageDataset) -> None:
    alone = scaled(dataset)
    assert run_on_ranks(2, scaled, dataset) == [alone, alone]
    stored: Any = encode_pictures(dataset, Haar(1), mirrored=False).space
    np.testing.assert_allclose(alone, (stored.mean, stored.std), rtol=1e-3, atol=1e-4)


def test_a_run_that_resumes_keeps_its_scale(dataset: ImageDataset, tmp_path: Path) -> None:
    known = LatentsInStep(Haar(1), SIDE, mean=[7.0] * 12, std=[3.0] * 12)
    run = TrainingConfig(output_dir=tmp_path)
    assert recorded_space(run) is None
    checkpoint.save(run.checkpoints, 1, {}, {checkpoint.FLOW_FILE: {"space": describe(known)}})
    medium = LatentsInStep(Haar(1), SIDE).medium
    _, space = medium.rows(dataset, mirrored=True, recorded=recorded_space(run))
    assert isinstance(space, LatentsInStep)
    assert (space.mean, space.std) == ([7.0] * 12, [3.0] * 12)


def test_the_autoencoder_decides_and_a_student_stores_latents() -> None:
    data = DataConfig(autoencoder=("small",), image_size=16, augment=0.1)
    teacher = build_space(data)
    assert isinstance(teacher, LatentsInStep)
    assert (teacher.key, teacher.augmentation, teacher.horizontal_flip) == ("images", 0.1, True)
    assert isinstance(build_space(DataConfig(autoencoder=("small",), image_size=16, crop="random")), LatentsInStep)
    student = build_space(DataConfig(autoencoder=("small",), image_size=16), teacher=teacher)
    plain = (build_space(DataConfig(autoencoder=(name,), image_size=16)) for name in ("small", "Haar"))
    for stored in (student, *plain):
        assert (type(stored), stored.key) == (Latents, "latents")
