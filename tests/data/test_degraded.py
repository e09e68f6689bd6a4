"""Tests of datasets whose sources are degraded data."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.data.degraded import Degraded
from rectified_flow.data.stream import Batches
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.measurements.space import Fields
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.degradations import Blur, Degradation, Downsample, Grey, Mask
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import DataFacts, Space
from tests.training.runs import tiny_dataset

COUNT, SIDE = 12, 8
SPACE = Pixels((3, SIDE, SIDE))


def items(side: int = SIDE) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"dtype": torch.uint8, "generator": generator}
    return [{"images": torch.randint(256, (3, side, side), **how)} for _ in range(COUNT)]


def sources(data: Any, numbers: Any) -> Tensor:
    batch: dict[str, Tensor] = Batches(data).__getitems__(numbers)
    return batch["source"]


@pytest.mark.parametrize("degradation", [Downsample(2), Grey(), Blur()])
def test_sources_are_degraded_pictures_of_any_size(degradation: Degradation) -> None:
    """The pictures are larger than the parts that training crops."""
    data: Any = items(side=12)
    found = sources(Degraded(data, degradation, SPACE), range(COUNT))
    pictures = torch.stack([each["images"] for each in data])
    assert torch.equal(found, degradation(pictures.float() / 127.5 - 1))


def test_sources_of_measurements_are_in_physical_units() -> None:
    space = Fields((3, SIDE, SIDE), (0.0,) * 3, (255.0,) * 3)
    data: Any = [{"images": each["images"].float()} for each in items()]
    found = sources(Degraded(data, Downsample(8), space), [0])
    means = data[0]["images"].mean(dim=(1, 2), keepdim=True)
    assert torch.allclose(found[0], means.expand(3, SIDE, SIDE), rtol=1e-5)


def test_holes_are_a_function_of_the_seed_and_of_the_number() -> None:
    data: Any = items()
    holed = Degraded(data, Mask(), SPACE, seed=3)
    holes = sources(holed, range(COUNT)).isnan()
    assert len({each.numpy().tobytes() for each in holes}) > COUNT - 3, "small boxes may be equal"
    assert torch.equal(sources(holed, [7, 2]).isnan(), holes[[7, 2]]), "in any company"
    assert torch.equal(holed[5]["source"].isnan(), holes[5])
    assert torch.equal(sources(pickle.loads(pickle.dumps(holed)), [4]).isnan(), holes[[4]])
    assert not torch.equal(sources(holed, [COUNT]).isnan(), holes[[0]]), "another hole in each epoch"
    assert not torch.equal(sources(Degraded(data, Mask(), SPACE, seed=4), [0]).isnan(), holes[[0]])


def test_it_is_the_dataset_but_for_its_sources(tmp_path: Path) -> None:
    pictures = tiny_dataset(tmp_path, 10)
    grey = Degraded(pictures, Grey(), SPACE)
    part = grey.subset([8, 1])
    assert (len(grey), len(part)) == (10, 2)
    assert (part.names, part.conditions, part.path) == (
        pictures.subset([8, 1]).names,
        pictures.conditions,
        pictures.path,
    )
    assert torch.equal(part[1]["source"], grey[1]["source"])
    assert len({pictures.fingerprint, grey.fingerprint, Degraded(pictures, Blur(), SPACE).fingerprint}) == 3
    with pytest.raises(AttributeError):
        _ = grey.nothing


@pytest.mark.parametrize("augmentation", [0.0, 0.9])
@pytest.mark.parametrize("stored", [Pixels(), Fields((3, SIDE, SIDE), (0.0,) * 3, (255.0,) * 3)])
def test_known_pixels_are_those_of_the_target_however_it_is_augmented(stored: Space, augmentation: float) -> None:
    """Parts are cropped, mirrored and augmented. A hole moves with its picture, and does not spread."""
    made = type(stored).of(DataFacts((3, SIDE, SIDE), mirrored=True, augmentation=augmentation, stored=stored))
    flow = RectifiedFlow(nn.Identity(), space=made, from_source=True)
    data: Any = items(side=10)
    batch = Batches(Degraded(data, Mask(), made)).__getitems__(range(COUNT))
    with deterministic(BatchRows(0, 1, COUNT, slice(None))):
        x_0, _, _ = flow.draw_batch({"images": batch["images"], "source": batch["source"]})
    with deterministic(BatchRows(0, 1, COUNT, slice(None))):
        source = made.source_space.augment(batch["source"])[0]
    source = made.encode(source)
    known = ~source.isnan()
    assert 0.2 < known.float().mean() < 0.95
    assert not torch.equal(x_0, made.encode(batch["images"]))
    near = (source - x_0)[known].abs()
    assert near.max() < 1e-5 if not augmentation else near.median() < 0.02
