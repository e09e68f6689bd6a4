"""The symmetries of a network for clouds of points."""

import pytest
import torch
from torch import Tensor

from conditions import Vector
from geometry import Euclidean, FlatTorus, Geometry, Sphere
from rectified_flow.condition import Labels
from set_transformer import SetTransformer


def network(geometry: Geometry) -> SetTransformer:
    torch.manual_seed(0)
    each = SetTransformer(geometry, {"labels": Labels(3), "level": Vector((0.0, 1.0), (1.0, 2.0))}, 32, 2)
    torch.nn.init.normal_(each.out.weight)
    return each


def inputs(geometry: Geometry) -> tuple[Tensor, dict[str, Tensor]]:
    x = geometry.from_normal(torch.randn(3, 5, geometry.dim))
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]]).expand(3, -1)
    conditions = {"labels": torch.tensor([0, 1, 2]), "level": torch.randn(3, 2)}
    return x, {"t": torch.rand(3), "weights": weights, **conditions}


@pytest.mark.parametrize("geometry", [Euclidean(2), Sphere(3), FlatTorus(2)], ids=str)
def test_another_order_of_the_points_is_that_order_of_the_output(geometry: Geometry) -> None:
    f, (x, given), order = network(geometry), inputs(geometry), torch.randperm(5)
    permuted = f(x[:, order], **given | {"weights": given["weights"][:, order]})
    assert torch.allclose(permuted, f(x, **given)[:, order], atol=1e-5)


@pytest.mark.parametrize("value", [7.0, torch.nan, torch.inf])
def test_absent_points_change_no_bit_of_the_output(value: float) -> None:
    f, (x, given) = network(Sphere(3)), inputs(Sphere(3))
    moved = x.clone()
    moved[:, 4] = value
    assert torch.equal(f(moved, **given)[:, :4], f(x, **given)[:, :4])


def test_two_halves_are_one_point() -> None:
    f, (x, given) = network(Sphere(3)), inputs(Sphere(3))
    weights = given["weights"][:, [0, 1, 2, 3, 3]] * torch.tensor([1, 1, 1, 0.5, 0.5])
    halved = f(x[:, [0, 1, 2, 3, 3]], **given | {"weights": weights})
    assert torch.allclose(halved[:, :4], f(x, **given)[:, :4], atol=1e-5)
    assert not torch.allclose(f(x, **given | {"weights": torch.ones(3, 5)}), f(x, **given), atol=1e-3)


def test_missing_conditions_are_conditions_that_are_left_out() -> None:
    f, (x, given) = network(FlatTorus(2)), inputs(FlatTorus(2))
    missing = {"level": torch.full((3, 2), torch.nan), "labels": torch.full((3,), 3)}
    without = {name: value for name, value in given.items() if name not in missing}
    assert torch.equal(f(x, **given | missing), f(x, **without))
    for name, value in missing.items():
        assert not torch.allclose(f(x, **given | {name: value}), f(x, **given)), name
    some = {"level": torch.where(torch.tensor([True, False]), given["level"], torch.nan)}
    partly = f(x, **given | some)
    assert partly.isfinite().all()
    assert not torch.allclose(partly, f(x, **given)), "one value of a vector is missing"
