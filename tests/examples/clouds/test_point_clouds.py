"""Clouds of points in memory: padding, weights, pickles and bad input."""

import pickle

import pytest
import torch
from torch import Tensor

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import PointClouds
from rectified_flow.condition import Labels
from rectified_flow.errors import UsageError

CLOUDS = [torch.rand(3, 2), torch.rand(5, 2), torch.rand(1, 2)]


def test_clouds_of_different_sizes_are_padded() -> None:
    labels = torch.tensor([2, 0, 1])
    data = PointClouds(CLOUDS, Euclidean(2), conditions={"labels": (Labels(3), labels)})
    assert len(data) == 3
    assert data.description == "3 clouds of up to 5 points"
    assert data.conditions == {"labels": Labels(3)}
    item = data[0]
    assert torch.equal(item["clouds"][:3], CLOUDS[0])
    assert item["weights"].tolist() == [1, 1, 1, 0, 0]
    assert item["labels"] == 2
    batch = data.read_batch([1, 0])
    assert torch.equal(batch["clouds"][0], CLOUDS[1])
    assert {name: len(values) for name, values in batch.items()} == {"clouds": 2, "weights": 2, "labels": 2}


def test_points_of_weight_0_are_left_out_whatever_they_are() -> None:
    cloud = torch.tensor([[0.0, 0.0, 1.0], [torch.nan, 0.0, 0.0], [0.0, 1.0, 0.0]])
    data = PointClouds([cloud], Sphere(3), weights=[torch.tensor([1.0, 0.0, 3.0])])
    assert torch.equal(data[0]["clouds"], cloud[[0, 2]])
    assert data[0]["weights"].tolist() == [1, 3]


def test_the_fingerprint_is_that_of_the_content() -> None:
    one, same = PointClouds(CLOUDS, Euclidean(2)), PointClouds(CLOUDS, Euclidean(2))
    other = PointClouds(CLOUDS[::-1], Euclidean(2))
    assert one.fingerprint == same.fingerprint == pickle.loads(pickle.dumps(one)).fingerprint
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("cloud", "weights", "geometry", "sentence"),
    [
        (torch.tensor([[0.0, torch.nan]]), None, Euclidean(2), "cloud 1: points are not finite"),
        (torch.rand(4, 2), torch.zeros(4), Euclidean(2), "cloud 1: all of its weights are zero"),
        (torch.rand(4, 2), torch.tensor([1.0, -1, 1, 1]), Euclidean(2), "cloud 1: a weight is negative"),
        (torch.rand(4, 2), torch.ones(3), Euclidean(2), "cloud 1: 3 weights for 4 points"),
        (torch.rand(4, 3), None, Euclidean(2), "cloud 1: points have 3 coordinates; .* takes 2"),
        (torch.rand(4), None, Euclidean(2), r"cloud 1: its shape is \(4,\)"),
        (torch.rand(0, 2), None, Euclidean(2), "cloud 1: it has no points"),
        (torch.tensor([[0.0, 0.0, 1.01]]), None, Sphere(3), "cloud 1: points reach 0.01 off the unit sphere"),
        (torch.tensor([[0.5, 1.5]]), None, FlatTorus(2), "cloud 1: points reach from 0.5 to 1.5"),
    ],
)
def test_bad_clouds_are_named(cloud: Tensor, weights: Tensor | None, geometry: Geometry, sentence: str) -> None:
    good = geometry.from_normal(torch.randn(2, geometry.dim))
    with pytest.raises(UsageError, match=sentence):
        PointClouds([good, cloud], geometry, weights=None if weights is None else [torch.ones(2), weights])


def test_no_clouds() -> None:
    with pytest.raises(UsageError, match="no clouds"):
        PointClouds([], Euclidean(2))
