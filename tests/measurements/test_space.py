"""Tests of the space of measurements, and of the loss on known values."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import Tensor, nn

from rectified_flow import MeanFlow, RectifiedFlow
from rectified_flow.data.description import PictureData
from rectified_flow.data.open import Pictures, open_dataset
from rectified_flow.errors import UsageError
from rectified_flow.load import reading_of
from rectified_flow.measurements.medium import ABOVE, BELOW, UNKNOWN, colour_map
from rectified_flow.measurements.space import Asinh, Fields, Linear, Log, Transform
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import DataFacts, with_augmentation

TRANSFORMS = [Linear(), Log(), Asinh(0.5)]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_its_inverse_and_its_slope(transform: Transform) -> None:
    values = torch.tensor([0.01, 0.5, 3.0, 4000.0], dtype=torch.float64)
    assert torch.allclose(transform.inverse(transform(values)), values, rtol=1e-12)
    slopes = torch.autograd.functional.jacobian(lambda v: transform(v).sum(), values)
    assert torch.allclose(transform.log_slope(values), slopes.log(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_ends_of_the_range_are_one_and_values_come_back(transform: Transform) -> None:
    space = Fields((2, 1, 3), (1.0, 200.0), (5.0, 6000.0), transform=transform)
    data = torch.tensor([[[[1.0, 2.0, 5.0]], [[200.0, 9000.0, 6000.0]]]])
    x = space.encode(data)
    assert torch.allclose(x[0, :, 0, [0, 2]], torch.tensor([[-1.0, 1.0]]).expand(2, 2), atol=1e-5)
    assert x[0, 1, 0, 1] > 1, "a value beyond the range was clipped"
    assert torch.allclose(space.decode(x), data, rtol=1e-5)


def test_sixteen_bits_come_back_exactly() -> None:
    levels = torch.arange(2**16).reshape(1, 1, 256, 256).to(torch.uint16)
    for low, high in ((0.0, 65535.0), (1000.0, 3000.0)):
        space = Fields((1, 256, 256), (low,), (high,), dtype="uint16")
        stored = space.to_stored(space.encode(levels))
        assert stored.dtype == torch.uint16
        assert torch.equal(stored.int(), levels.int())


def test_colours_mark_what_is_outside_and_unknown() -> None:
    space = Fields((2, 1, 5), (0.0, 0.0), (1.0, 10.0), show="2:viridis")
    row = torch.tensor([0.0, 10.0, -1.0, 11.0, math.nan])
    picture = space.medium.render(torch.stack((torch.zeros(5), row))[None, :, None])[0, :, 0].T.tolist()
    table = colour_map("viridis").tolist()
    assert picture == [table[0], table[-1], list(BELOW), list(ABOVE), list(UNKNOWN)]
    legend = space.medium.legend
    assert legend is not None
    assert (legend.least, legend.greatest, legend.name) == ("0", "10", "channel 2")


def test_three_channels_as_colours() -> None:
    space = Fields((4, 1, 1), (0.0,) * 4, (255.0,) * 4, show="4,2,1")
    picture = space.medium.render(torch.tensor([10.0, 20.0, 30.0, 40.0]).reshape(1, 4, 1, 1))
    assert picture.flatten().tolist() == [40, 20, 10]
    assert space.medium.legend is None


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"show": "3"}, "names no channels from 1 to 2"),
        ({"show": "1:rainbows"}, "no colour map rainbows"),
        ({"low": (0.0, 1.0), "high": (1.0, 1.0)}, r"ranges are \(0.0, 1.0\) to \(1.0, 1.0\): pass MIN below MAX"),
    ],
)
def test_bad_arguments(how: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _ = Fields((2, 4, 4), **how).medium.legend  # type: ignore[arg-type]


def test_augmentation_changes_places_and_no_values() -> None:
    space = Fields((2, 8, 8), (100.0, -1.0), (200.0, 1.0), horizontal_flip=True, augmentation=1.0)
    data = torch.tensor([180.0, 0.5])[None, :, None, None].expand(16, 2, 8, 8)
    changed, numbers = space.augment(data)
    assert torch.allclose(changed, data, rtol=1e-4)
    assert (numbers["augmentation"][:, 9:] == 0).all(), "colours were changed"
    assert (numbers["augmentation"][:, :9] != 0).any()


class Scaled(nn.Module):
    """A network that returns a multiple of its input, and remembers the input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None) -> Tensor:
        self.seen = x
        return self.weight * x


def test_unknown_values_are_left_out_of_the_loss() -> None:
    flow = RectifiedFlow(Scaled(0.0), space=Fields((1, 2, 4), has_missing=True))
    x_0, noise, t = torch.ones(3, 1, 2, 4), torch.full((3, 1, 2, 4), 3.0), torch.full((3,), 0.5)
    x_0[0, 0, 0, :3], noise[0, 0, 0, :3] = math.nan, 100.0
    x_0[2] = math.nan  # nothing is known
    loss = flow.loss(x_0, noise, t, {})
    assert loss.item() == pytest.approx((4 + 4 + 0) / 3, rel=1e-6)  # (3 - 1)^2 over the known values of each row
    assert isinstance(flow.network, Scaled)
    assert flow.network.seen.isfinite().all()


def test_unknown_values_have_no_gradient() -> None:
    network = Scaled(1.0)
    for flow in (
        RectifiedFlow(network, space=Fields((1, 2, 2), has_missing=True)),
        MeanFlow(network, space=Fields((1, 2, 2), has_missing=True)),
    ):
        losses = []
        for other in (1.0, 50.0):
            x_0, noise = torch.full((2, 1, 2, 2), 0.5), torch.ones(2, 1, 2, 2)
            x_0[:, 0, 0, 0], noise[:, 0, 0, 0] = math.nan, other
            t, r = torch.full((2,), 0.7), torch.full((2,), 0.2)
            given: tuple[Any, ...] = (
                (x_0, noise, t, {}) if isinstance(flow, RectifiedFlow) else (x_0, noise, t, r, {}, 2)
            )
            loss = flow.loss(*given)
            losses.append((loss if isinstance(loss, Tensor) else loss[0]).item())
        assert math.isfinite(losses[0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def stored_fields(count: int = 1000) -> DataFacts:
    """Return facts of stored fields of one channel, with the values 0 to ``count - 1``."""
    values = torch.arange(float(count)).reshape(count, 1, 1, 1).expand(-1, -1, 2, 2).numpy()
    return DataFacts((3, 2, 2), stored=Fields((1, 2, 2), (0.0,), (count - 1.0,)), values=values)


def test_percentiles_are_those_of_the_stored_values() -> None:
    space = Fields.of(stored_fields(), value_range="percentile:10")
    assert [*space.low, *space.high] == pytest.approx([99.9, 899.1])
    assert Fields.of(replace(stored_fields(), values=None), value_range="percentile:10").low == (0.0,)


def test_a_student_has_the_scale_of_its_teacher() -> None:
    teacher = Fields((1, 2, 2), (-5.0,), (5.0,), transform=Asinh(2.0), augmentation=0.5)
    space = Fields.of(replace(stored_fields(), teacher=teacher))
    assert (space.low, space.high, space.transform, space.augmentation) == ((-5.0,), (5.0,), Asinh(2.0), 0.0)


def test_sources_with_a_scale_of_their_own_are_mirrored_like_their_targets() -> None:
    facts = replace(stored_fields(), mirrored=True)
    space = Fields.of(replace(facts, sources=replace(facts, stored=Fields((1, 2, 2), (0.0,), (10.0,)))))
    assert (space.source_space.low, space.source_space.high) == ((0.0,), (10.0,))
    data = torch.tensor([0.0, 1.0]).expand(16, 1, 2, 2)
    with deterministic(BatchRows(0, 0, 16, slice(None))):
        pairs = space.augment(data)[0], space.source_space.augment(data)[0]
    assert torch.equal(*pairs)
    assert not torch.equal(pairs[0], data)


def test_sources_are_augmented_like_their_targets_whenever_it_is_chosen() -> None:
    facts = stored_fields()
    space = with_augmentation(Fields.of(replace(facts, sources=facts)), 1.0)
    data = torch.linspace(0, 1, 16 * 4).reshape(16, 1, 2, 2)
    with deterministic(BatchRows(0, 0, 16, slice(None))):
        pairs = space.augment(data)[0], space.source_space.augment(data)[0]
    assert torch.equal(*pairs)
    assert not torch.equal(pairs[0], data)


def test_sources_may_be_in_files_of_another_layout(tmp_path: Path) -> None:
    """Targets ``[c, h, w]`` and sources ``[h, w, c]``, or in files of another format."""
    values = np.arange(3 * 8 * 8, dtype=np.float32).reshape(3, 8, 8)
    np.save(tmp_path / "source.npy", np.moveaxis(values, 0, 2))
    of_targets = {"suffix": ".npy", "dtype": "float32", "channels": 3, "channels_last": False}
    of_sources = of_targets | {"channels_last": True}
    sources = Fields((3, 8, 8), (0.0,) * 3, (1.0,) * 3, files=of_sources)
    medium = Fields((3, 8, 8), (0.0,) * 3, (1.0,) * 3, files=of_targets, sources=sources).medium
    assert torch.equal(medium.read(tmp_path / "source.npy"), torch.from_numpy(values))
    assert medium.size_of(tmp_path / "source.npy") == (8, 8)
    tiff = Fields((3, 8, 8), (0.0,) * 3, (1.0,) * 3, files=of_targets | {"suffix": ".tif"})
    assert {".tif", ".tiff"} == {*replace(medium.space, sources=tiff).medium.input_suffixes}


def test_fields_for_sampling_are_framed_as_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    for number in range(3):
        np.save(tmp_path / f"wide/{number}.npy", np.tile(np.arange(16, dtype=np.float32) + number, (8, 1)))
    for crop in ("none", "center"):
        data = open_dataset("", tmp_path / "wide", image_size=8, space="Fields", crop=crop, cache_dir=tmp_path)
        assert isinstance(data.described, Pictures)
        trained: Any = SimpleNamespace(data=PictureData(data.described), flow=SimpleNamespace(space=data.space))
        field = data.space.medium.read(tmp_path / "wide/1.npy", **reading_of(trained))
        assert torch.equal(field.nan_to_num(-1), data.read_batch([1])["images"][0].nan_to_num(-1))
        assert field.isnan().any() == (crop == "none")


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_value_that_the_transform_does_not_take_is_named(value: float, tmp_path: Path) -> None:
    medium = Fields((1, 8, 8), (1.0,), (2.0,), transform=Log()).medium
    values = np.ones((1, 8, 8), np.float32)
    values[0, 0, :2] = math.nan, value
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(ValueError, match=f"it holds the value {value:g}, for which transform=log is undefined"):
        medium.read(tmp_path / "a.npy")
    values[0, 0, 1] = 1
    np.save(tmp_path / "a.npy", values)
    assert medium.read(tmp_path / "a.npy").isnan().sum() == 1


def test_a_file_of_integers_may_have_a_mark_for_unknown_values(tmp_path: Path) -> None:
    """Though its values are then read as floating point; files of another type are refused."""
    values, nodata = np.arange(64, dtype=np.int16).reshape(8, 8), [(42113, "s", 0, "0", True)]
    tifffile.imwrite(tmp_path / "a.tif", values, extratags=nodata, photometric="minisblack")
    files = {"suffix": ".tif", "dtype": "int16", "channels": 1, "channels_last": False}
    medium = Fields((1, 8, 8), (0.0,), (1.0,), files=files).medium
    assert medium.read(tmp_path / "a.tif").nan_to_num(0).flatten().tolist() == [*range(64)]
    medium = Fields((1, 8, 8), (0.0,), (1.0,), files=files | {"dtype": "uint16"}).medium
    with pytest.raises(ValueError, match="it has 1 channel of float32, not 1 channel of uint16"):
        medium.read(tmp_path / "a.tif")


def test_measurements_alone_have_this_space() -> None:
    with pytest.raises(UsageError, match="needs measurements"):
        Fields.of(DataFacts((3, 8, 8), stored=Pixels()))
