"""Clouds of points in memory: padding, weights, conditions, pickles and bad input."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from conditions import Vector
from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import PointClouds, Points, draw_by_point, trim
from rectified_flow import UsageError
from rectified_flow.condition import Labels

CLOUDS = [torch.rand(3, 2), torch.rand(5, 2), torch.rand(1, 2)]
CONDITIONS: dict[str, Any] = {"conditions": {"labels": torch.tensor([2, 0, 1])}, "kinds": {"labels": Labels(3)}}


def test_clouds_of_different_sizes_are_padded_by_points_of_weight_0() -> None:
    data = PointClouds(CLOUDS, Euclidean(2), **CONDITIONS)
    assert len(data) == 3
    assert data.description == "3 clouds of up to 5 points"
    assert data.conditions == {"labels": Labels(3)}
    item = data[0]
    assert torch.equal(item["clouds"][:3], CLOUDS[0])
    assert torch.equal(item["clouds"][3:], CLOUDS[0][:1].expand(2, 2))
    assert item["weights"].tolist() == [1, 1, 1, 0, 0]
    assert item["labels"] == 2
    batch = data.read_batch([1, 0])
    assert torch.equal(batch["clouds"][0], CLOUDS[1])
    assert {name: len(values) for name, values in batch.items()} == {"clouds": 2, "weights": 2, "labels": 2}
    masses = [torch.rand(len(cloud)) + 0.1 for cloud in CLOUDS]
    weighted = PointClouds(CLOUDS, Euclidean(2), weights=masses, size=7)
    assert torch.equal(weighted[1]["weights"], torch.cat((masses[1], torch.zeros(2))))


def test_the_fingerprint_is_that_of_the_content() -> None:
    one, same = (PointClouds(CLOUDS, Euclidean(2), **CONDITIONS) for _ in range(2))
    other = PointClouds(CLOUDS[::-1], Euclidean(2), **CONDITIONS)
    assert one.fingerprint == same.fingerprint == pickle.loads(pickle.dumps(one)).fingerprint
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("cloud", "geometry", "sentence"),
    [
        (torch.tensor([[0.0, torch.nan]]), Euclidean(2), "cloud 1: points are not finite"),
        (torch.rand(4, 3), Euclidean(2), r"cloud 1: its shape is \(4, 3\); .* needs points \[n, 2\]"),
        (torch.rand(4), Euclidean(2), r"cloud 1: its shape is \(4,\)"),
        (torch.rand(0, 2), Euclidean(2), r"cloud 1: its shape is \(0, 2\)"),
        (torch.tensor([[0.0, 0.0, 1.01]]), Sphere(3), "cloud 1: points are up to 0.01 off the Sphere"),
        (torch.tensor([[0.5, 1.5]]), FlatTorus(2), "cloud 1: points are up to 1 off the FlatTorus"),
    ],
)
def test_bad_clouds_are_named(cloud: Tensor, geometry: Geometry, sentence: str) -> None:
    good = geometry.from_normal(torch.randn(2, geometry.dim))
    weights = [torch.ones(2), torch.ones(len(cloud))]
    with pytest.raises(UsageError, match=sentence):
        PointClouds([good, cloud], geometry, weights=weights)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (torch.ones(2), r"cloud 2: it has 1 points and weights \[2\]"),
        (torch.zeros(1), "cloud 2: its weights must be finite, not negative, and not all zero"),
        (torch.tensor([-1.0]), "cloud 2: its weights must be finite"),
        (torch.tensor([torch.nan]), "cloud 2: its weights must be finite"),
    ],
)
def test_bad_weights_are_named(weights: Tensor, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        PointClouds(CLOUDS, Euclidean(2), weights=[torch.ones(3), torch.ones(5), weights])


def test_padding_is_trimmed_and_replaced() -> None:
    weights = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0]])
    x = torch.randn(2, 5, 3)
    x[:, 3:] = torch.nan
    w, trimmed = trim(weights, x)
    assert torch.equal(w, weights[:, :3])
    assert torch.equal(trimmed, torch.stack((x[0, [1, 1, 2]], x[1, [0, 0, 0]])))


def test_numbers_of_points_do_not_depend_on_the_points_that_follow() -> None:
    def draw(purpose: str, shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(len(purpose) + ord(purpose[-1])))

    long = draw_by_point(draw, "noise", (3, 150, 2))
    assert long.shape == (3, 150, 2)
    assert torch.equal(draw_by_point(draw, "noise", (3, 7, 2)), long[:, :7])
    assert not torch.equal(long[:, :64], long[:, 64:128])


def test_vectors_with_missing_values() -> None:
    values = torch.tensor([[1.0, 10.0], [3.0, torch.nan], [torch.nan, 30.0]])
    kind = Vector.of(values)
    assert kind.mean == (2.0, 20.0)
    assert kind.std == (1.0, 10.0)
    assert kind.is_none(torch.tensor([[torch.nan, torch.nan], [torch.nan, 1.0]])).tolist() == [True, False]
    assert torch.equal(kind.parse(["2 -1.5", "nan 4"]).nan_to_num(9.0), torch.tensor([[2, -1.5], [9, 4]]))
    embed = kind.embedding(4)
    one, other = embed(torch.tensor([[1.0, torch.nan], [1.0, 20.0]]))
    assert one.isfinite().all()
    assert not torch.allclose(one, other), "a missing value is not the mean"
    with pytest.raises(UsageError, match="'1 2 3' is not a vector: write 2 numbers, separated by spaces"):
        kind.parse(["1 2 3"])
    with pytest.raises(UsageError, match="is not a vector"):
        kind.parse(["1 two"])


def test_pictures_of_clouds() -> None:
    corner = torch.tensor([[[0.0, 0.0], [0.99, 0.5]]])
    picture = Points(FlatTorus(2)).render(corner)
    assert picture.shape == (1, 3, 96, 96)
    assert picture[0, 0, 95, 0] == picture[0, 1, 47, 95] == 255, "squares around the points, which the edges cut off"
    assert (picture[0, 0] > 0).sum() == 3 * 3 + 3 * 5
    poles = Points(Sphere(3)).render(torch.tensor([[[0.0, 0.0, -1.0]], [[0.0, 0.0, 1.0]]]))
    assert poles[:, 0].amax(dim=(1, 2)).tolist() == [90, 255]
