"""Clouds of points in memory: padding, pickles and bad input."""

import pickle

import pytest
import torch
from torch import Tensor

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import PointClouds
from rectified_flow.condition import Labels
from rectified_flow.errors import UsageError

CLOUDS = [torch.rand(3, 2), torch.rand(5, 2), torch.rand(1, 2)]
LABELS = torch.tensor([2, 0, 1])


def test_clouds_of_different_sizes_are_padded() -> None:
    data = PointClouds(CLOUDS, LABELS, Euclidean(2), classes=3)
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
    assert PointClouds(CLOUDS, LABELS, Euclidean(2), classes=3, size=7)[1]["weights"].tolist() == [1] * 5 + [0, 0]


def test_the_fingerprint_is_that_of_the_content() -> None:
    one, same = (PointClouds(CLOUDS, LABELS, Euclidean(2), classes=3) for _ in range(2))
    other = PointClouds(CLOUDS[::-1], LABELS, Euclidean(2), classes=3)
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
    with pytest.raises(UsageError, match=sentence):
        PointClouds([good, cloud], torch.tensor([0, 0]), geometry, classes=1)
