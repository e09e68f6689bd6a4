"""The symmetries of a network for clouds of points."""

import pytest
import torch
from torch import Tensor

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from rectified_flow.condition import Number
from set_transformer import SetTransformer


def network(geometry: Geometry) -> SetTransformer:
    torch.manual_seed(0)
    each = SetTransformer(geometry, {"level": Number((-2, 2))}, 32, 2)
    torch.nn.init.normal_(each.out.weight)
    return each


def inputs(geometry: Geometry) -> tuple[Tensor, dict[str, Tensor]]:
    x = geometry.from_normal(torch.randn(3, 5, geometry.dim))
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]]).expand(3, -1)
    return x, {"t": torch.rand(3), "weights": weights, "level": torch.randn(3)}


@pytest.mark.parametrize("geometry", [Euclidean(2), Sphere(3), FlatTorus(2)], ids=str)
def test_another_order_of_the_points_is_that_order_of_the_output(geometry: Geometry) -> None:
    f, (x, given), order = network(geometry), inputs(geometry), torch.randperm(5)
    permuted = f(x[:, order], **given | {"weights": given["weights"][:, order]})
    assert torch.allclose(permuted, f(x, **given)[:, order], atol=1e-5)


def test_absent_points_and_halved_ones() -> None:
    f, (x, given) = network(Sphere(3)), inputs(Sphere(3))
    moved = x.clone()
    moved[:, 4] = -x[:, 4]
    assert torch.equal(f(moved, **given)[:, :4], f(x, **given)[:, :4]), "a point of weight 0 is absent"
    weights = given["weights"][:, [0, 1, 2, 3, 3]] * torch.tensor([1, 1, 1, 0.5, 0.5])
    halved = f(x[:, [0, 1, 2, 3, 3]], **given | {"weights": weights})
    assert torch.allclose(halved[:, :4], f(x, **given)[:, :4], atol=1e-5), "two halves are one point"


def test_nan_is_no_condition() -> None:
    f, (x, given) = network(FlatTorus(2)), inputs(FlatTorus(2))
    none = f(x, **given | {"level": torch.full((3,), torch.nan)})
    without = {name: value for name, value in given.items() if name != "level"}
    assert torch.equal(none, f(x, **without))
    assert not torch.allclose(none, f(x, **given))
