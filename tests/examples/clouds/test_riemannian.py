"""Flows of clouds: rectified flow in the plane, closed forms elsewhere, and weights that weigh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import Points
from rectified_flow.condition import ConditionSpecs, Labels
from rectified_flow.data import GlobalBatch
from rectified_flow.errors import UsageError
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance, take_steps
from rectified_flow.flows.times import Uniform
from rectified_flow.load import build_flow
from rectified_flow.randomness import BatchRows, Samples, deterministic
from rectified_flow.registry import describe, register
from riemannian import STEPS, FixedStep, PointCoupling, RiemannianFlow
from set_transformer import SetTransformer

GEOMETRIES = [Euclidean(2), Sphere(3), FlatTorus(2)]


@register
class MeanField(nn.Module):
    """Each point by itself, with the weighted mean of all, the time and the label."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.conditions: ConditionSpecs = {"labels": Labels(2)}
        torch.manual_seed(0)
        self.layer = nn.Linear(2 * dim + 2, dim)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        mean = x.mean(dim=1, keepdim=True) if weights is None else (x * weights[..., None]).sum(dim=1, keepdim=True)
        context = torch.stack((t, labels.float()), dim=1)[:, None].expand(-1, x.shape[1], -1)
        output: Tensor = self.layer(torch.cat((x, mean.expand_as(x), context), dim=2))
        return output


class FromOnePoint(nn.Module):
    """The velocity of data that are one point: away from it, at the speed of one's distance over the time."""

    def __init__(self, geometry: Geometry, point: Tensor) -> None:
        super().__init__()
        self.geometry, self.point = geometry, point

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return -self.geometry.log(x, self.point.expand_as(x)) / t[:, None, None]


def flow_of(geometry: Geometry, **settings: Any) -> RiemannianFlow:
    return RiemannianFlow(MeanField(geometry.dim), space=Points(geometry, (6, geometry.dim)), **settings)


def transformer_of(geometry: Geometry, **settings: Any) -> RiemannianFlow:
    torch.manual_seed(0)
    network = SetTransformer(geometry, {"labels": Labels(2)}, 32, 1)
    nn.init.normal_(network.out.weight)
    return RiemannianFlow(network, space=Points(geometry), **settings)


def batch_of(geometry: Geometry, count: int = 8) -> dict[str, Tensor]:
    clouds = geometry.from_normal(torch.randn(count, 6, geometry.dim, generator=torch.Generator().manual_seed(3)))
    return {"clouds": clouds, "labels": torch.arange(count) % 2}


def test_in_the_plane_it_is_rectified_flow_to_the_bit() -> None:
    plane = Euclidean(2)
    ours = flow_of(plane, condition_dropout=0.5)
    theirs = RectifiedFlow(
        ours.network, space=Points(plane, (6, 2)), condition_dropout=0.5, time_distribution=Uniform()
    )
    losses = []
    for flow in (ours, theirs):
        with deterministic(BatchRows(0, 1, 8, slice(None))):
            losses.append(flow(**batch_of(plane)))
    assert losses[0] == losses[1]
    solvers: tuple[FixedStep, ...] = ("euler", "midpoint", "heun")
    for solver in solvers:
        samples = []
        for flow in (ours, theirs):
            with deterministic(Samples(0, range(4))):
                samples.append(flow.sample(4, steps=3, solver=solver, guidance=Guidance(2.0)))
        assert torch.equal(*samples), solver


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_data_that_are_one_point(geometry: Geometry) -> None:
    """The exact velocity has no loss, and leads every point there."""
    point = geometry.from_normal(torch.tensor([0.3, -0.8, 0.5][: geometry.dim]))
    flow = RiemannianFlow(FromOnePoint(geometry, point), space=Points(geometry, (5, geometry.dim)))
    torch.manual_seed(0)
    assert flow(clouds=point.expand(64, 5, -1)).item() < 1e-6
    # Just before time 0 the velocity is a ratio of small numbers: Euler does not go there, the others do.
    assert geometry.squared_distance(flow.sample(64, steps=4, solver="euler"), point).sqrt().max() < 1e-5
    assert geometry.squared_distance(flow.sample(64, steps=4, solver="midpoint"), point).sqrt().max() < 1e-5


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_samples_are_points_of_the_geometry(geometry: Geometry) -> None:
    flow = flow_of(geometry)
    samples = flow.sample(200, steps=8, solver="heun", weights=torch.ones(200, 6))
    if isinstance(geometry, Sphere):
        assert (samples.norm(dim=-1) - 1).abs().max() < 1e-5
    if isinstance(geometry, FlatTorus):
        assert samples.min() >= 0
        assert samples.max() < 1


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2)])
def test_orders_of_the_solvers_on_the_sphere(solver: FixedStep, order: int) -> None:
    """A turn about an axis, whose lines are not the sphere's straightest, and whose speed depends on the time."""
    axis = torch.tensor([0.0, 0.6, 0.8], dtype=torch.float64)
    x = Sphere(3).project(torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def turn(x: Tensor, t: float) -> Tensor:
        return 2 * t * torch.linalg.cross(axis.expand_as(x), x)

    angle = torch.tensor(-1.0, dtype=torch.float64)  # from time 1 to 0
    along = (x @ axis)[:, None] * axis
    exact = along + angle.cos() * (x - along) + angle.sin() * torch.linalg.cross(axis.expand_as(x), x)
    errors = []
    for steps in (16, 32):
        times = [1 - i / steps for i in range(steps + 1)]
        there = take_steps(partial(STEPS[solver], Sphere(3), turn), x, times)
        errors.append((there - exact).norm(dim=-1).max().item())
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.15)


def padded(batch: dict[str, Tensor], size: int, value: float) -> dict[str, Tensor]:
    """The batch with clouds of ``size`` points, where those after the fourth have weight 0 and this value."""
    clouds = torch.full((len(batch["clouds"]), size, batch["clouds"].shape[2]), value)
    weights = torch.zeros(clouds.shape[:2])
    clouds[:, :4], weights[:, :4] = batch["clouds"][:, :4], 3.0
    clouds[0, 2:], weights[0, 2:] = value, 0.0  # clouds of different sizes
    return batch | {"clouds": clouds, "weights": weights}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("coupling", ["independent", "barycentric", "drawn"])
def test_padding_changes_no_bit_of_loss_and_gradient(geometry: Geometry, coupling: PointCoupling) -> None:
    flow, batch = transformer_of(geometry, point_coupling=coupling, coupling="ot"), batch_of(geometry)

    def loss_and_gradient(batch: dict[str, Tensor]) -> Tensor:
        flow.zero_grad()
        with deterministic(BatchRows(0, 1, 8, slice(None))):
            loss = flow(**batch)
        loss.backward()
        return torch.cat([loss[None], *(p.grad.flatten() for p in flow.parameters() if p.grad is not None)])

    expected = loss_and_gradient(padded(batch, 4, 0.5))
    for size, value in ((4, torch.nan), (5, 0.1), (7, torch.nan), (70, 9.0)):
        assert torch.equal(loss_and_gradient(padded(batch, size, value)), expected), (size, value)
    fewer = padded(batch, 4, 0.5)
    fewer["weights"][:, 3] = 0
    assert not torch.allclose(loss_and_gradient(fewer)[0], expected[0]), "a point less is another loss"


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_padding_changes_no_bit_of_a_sample(geometry: Geometry) -> None:
    flow, batch = transformer_of(geometry), batch_of(geometry)

    def sample(size: int) -> Tensor:
        weights = padded(batch, size, 0.0)["weights"]
        with deterministic(Samples(0, range(8))):
            return flow.sample(weights=weights, labels=batch["labels"], steps=2, guidance=Guidance(2.0))

    expected = sample(4)
    for size in (5, 7, 70):
        longer = sample(size)
        assert torch.equal(longer[:, :4], expected)
        assert torch.equal(longer[:, 4:], longer[:, :1].expand(-1, size - 4, -1)), (
            "padding is copies of the first point"
        )
    assert torch.equal(expected[0, 2:], expected[0, :1].expand(2, -1))


def test_equal_weights_are_no_weights() -> None:
    flow, batch = flow_of(Sphere(3)), batch_of(Sphere(3)) | {"noise": torch.randn(8, 6, 3)}
    losses = []
    for weights in ({}, {"weights": torch.full((8, 6), 7.0)}):
        with deterministic(BatchRows(0, 1, 8, slice(None))):
            losses.append(flow(**batch, **weights).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_coupled_points_come_from_near(geometry: Geometry) -> None:
    x_0 = geometry.from_normal(torch.randn(16, 20, geometry.dim))
    noise = geometry.from_normal(torch.randn(16, 20, geometry.dim))

    def travelled(coupling: PointCoupling) -> float:
        flow = flow_of(geometry, point_coupling=coupling)
        return geometry.squared_distance(x_0, flow.couple(x_0, noise, None)).mean().item()

    independent = travelled("independent")
    assert travelled("drawn") < 0.5 * independent
    assert travelled("barycentric") < 0.5 * independent
    drawn = flow_of(geometry, point_coupling="drawn", regularisation=1e-3).couple(x_0, noise, None)
    nearest = geometry.squared_distance(drawn[:, :, None], noise[:, None]).min(dim=2)
    assert nearest.values.max() < 1e-10, "each is a point of the noise"
    used = torch.stack([row.bincount(minlength=20) for row in nearest.indices])
    assert (used == 1).float().mean() > 0.8, "nearly a permutation"


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("coupling", ["independent", "ot"])
def test_parts_of_a_global_batch_are_trained_like_the_whole(geometry: Geometry, coupling: Any) -> None:
    """Draws, couplings of points and of clouds, and gradients are those of the joined batch."""
    flow = flow_of(geometry, point_coupling="drawn", coupling=coupling, condition_dropout=0.3)
    batch = batch_of(geometry) | {"weights": torch.arange(48.0).reshape(8, 6) % 5}

    def gradients(parts: list[list[int]]) -> Tensor:
        flow.zero_grad()
        pairs: dict[str, Tensor] = {}
        if coupling == "ot":
            with deterministic(BatchRows(0, 5, 8, slice(None))):
                pairs = {"noise_rows": flow.pair(**batch)}
                assert torch.equal(batch["labels"][pairs["noise_rows"]], batch["labels"])
                assert not torch.equal(pairs["noise_rows"], torch.arange(8))
        for rows in parts:
            with deterministic(BatchRows(0, 5, 8, rows)):
                loss = flow(**{name: values[rows] for name, values in (batch | pairs).items()})
            (loss / len(parts)).backward()
        return torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None])

    cut = GlobalBatch(2, 2, 2)
    everything = list(range(8))
    parts = [everything[cut.rows(rank, micro)] for rank in range(2) for micro in range(2)]
    assert torch.allclose(gradients(parts), gradients([everything]), atol=1e-6)


def test_it_comes_back_from_its_description() -> None:
    flow = flow_of(Sphere(3), point_coupling="barycentric", regularisation=0.1, coupling="ot")
    again = build_flow(describe(flow), "a test")
    assert isinstance(again, RiemannianFlow)
    assert describe(again) == describe(flow)
    assert again.space.geometry == Sphere(3)


def test_pictures_of_clouds() -> None:
    corner = torch.tensor([[[0.0, 0.0], [0.99, 0.5]]])
    picture = Points(FlatTorus(2)).render(corner)
    assert picture.shape == (1, 3, 96, 96)
    assert picture[0, 0, 95, 0] == picture[0, 1, 47, 95] == 255, "squares around the points, which the edges cut off"
    assert (picture[0, 0] > 0).sum() == 3 * 3 + 3 * 5
    poles = Points(Sphere(3)).render(torch.tensor([[[0.0, 0.0, -1.0]], [[0.0, 0.0, 1.0]]]))
    assert poles[:, 0].amax(dim=(1, 2)).tolist() == [90, 255]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (lambda: flow_of(Sphere(3), coupling="immiscible"), "take ot or independent"),
        (
            lambda: RiemannianFlow(FromOnePoint(Sphere(3), torch.eye(3)[0]), space=Points(Sphere(3), (5, 3))).sample(
                2, guidance=Guidance(2.0)
            ),
            "takes conditions",
        ),
    ],
)
def test_what_it_refuses(what: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        what()


def test_solvers_of_flat_spaces_are_refused() -> None:
    with pytest.raises(UsageError, match="--solver ab2 has no form on a geometry: pass euler, midpoint, heun"):
        flow_of(Sphere(3)).sample(2, solver="ab2")  # type: ignore[arg-type]
