"""Digits as clouds on each geometry, and the measurements of clouds by hand."""

import os
import signal

import ot
import pytest
import torch

from cloud_distances import Distances, chamfer, wasserstein
from digits import GEOMETRIES, Digits
from geometry import Euclidean
from point_clouds import Points
from rectified_flow.system.signals import Interrupted, defer_signals, stop_on_signals


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_digits_are_wrapped_and_come_back(name: str) -> None:
    digits = Digits(name, 12)
    for cloud in digits.clouds[:20]:
        assert Points(digits.geometry).problem_with(cloud) is None
        assert 6 <= len(cloud) <= 12
        assert digits.unwrap(cloud).abs().max() <= 1 + 1e-5
        assert torch.allclose(digits.wrap(digits.unwrap(cloud)), cloud, atol=1e-5)
    training, held_out, others = digits.split(100)
    assert len(training) + len(held_out) + len(others) == len(digits.clouds)
    for part in (held_out, others):
        assert part.entries["labels"].bincount().tolist() == [10] * 10


def test_rasters_are_the_pictures_again() -> None:
    digits = Digits("sphere", 400)
    cloud = digits.clouds[0]
    raster = digits.rasterise(cloud[None], torch.ones(1, len(cloud)))[0]
    assert torch.allclose(raster, (digits.pictures[0] / digits.pictures[0].sum()).float(), atol=0.03)


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_moments_by_hand(name: str) -> None:
    digits = Digits(name, 4)
    flat = torch.tensor([[[-0.3, -0.4], [0.3, 0.4], [0.1, 0.1]]])
    weights = torch.tensor([[1.0, 1.0, 0.0]])
    assert torch.allclose(digits.moments_of(digits.wrap(flat), weights), torch.tensor([[0.3, 0.4, 1.0]]), atol=1e-5)


def test_conditions_are_missing_in_training_data_alone() -> None:
    training, held_out, _ = Digits("plane", 4, missing=0.3).split(100)
    lost = {name: kind.is_none(training.entries[name]) for name, kind in training.conditions.items()}
    for name, rows in lost.items():
        assert rows.float().mean() == pytest.approx(0.3, abs=0.05), name
        assert not training.conditions[name].is_none(held_out.entries[name]).any()
    assert (lost["labels"] & lost["moments"]).float().mean() == pytest.approx(0.09, abs=0.03), "each on its own"


def test_distances_by_hand() -> None:
    x, y = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([[[0.0, 1.0], [9.0, 9.0]], [[3.0, 0.0], [0.0, 2.0]]])
    a, b = torch.tensor([0.5, 0.5]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    costs = Euclidean().squared_distance(x[None, :, None], y[:, None])
    assert wasserstein(costs, a, b).tolist() == pytest.approx([0.5 * 1 + 0.5 * 10, 0.5 * 4])
    assert chamfer(costs, a, b).tolist() == pytest.approx([0.5 * 1 + 0.5 * 10 + 1, 0.5 * 4 + 0.5 * 4])
    generator = torch.Generator().manual_seed(0)
    cost, a, b = (torch.rand(*shape, generator=generator) for shape in ((1, 6, 5), (6,), (1, 5)))
    a, b = a / a.sum(), b / b.sum()
    plan = ot.emd(*(each.double().numpy() / each.double().sum().item() for each in (a, b[0])), cost[0].double().numpy())
    assert wasserstein(cost, a, b).item() == pytest.approx((plan * cost[0].double().numpy()).sum())


def test_a_stop_is_heeded_within_a_measurement() -> None:
    """The distances of all pairs of hundreds of clouds take a minute."""
    distances = Distances(Digits("plane", 8), 10, every=1)
    with stop_on_signals(), defer_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            distances.costs(distances.others["clouds"], distances.others["weights"])
