"""Geometries: closed forms, round trips, antipodes and edges, in float32."""

from math import pi

import pytest
import torch
from torch import Tensor

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import Points

GEOMETRIES = [Euclidean(2), Sphere(2), Sphere(3), Sphere(5), FlatTorus(1), FlatTorus(2)]
each = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)


def points(geometry: Geometry, count: int = 500, seed: int = 0) -> Tensor:
    return geometry.from_normal(torch.randn(count, geometry.dim, generator=torch.Generator().manual_seed(seed)))


def tangents(geometry: Geometry, x: Tensor, length: float) -> Tensor:
    v = geometry.to_tangent(x, torch.randn(x.shape, generator=torch.Generator().manual_seed(9)))
    return length * v / v.norm(dim=-1, keepdim=True)


@each
def test_log_is_the_way_that_exp_goes(geometry: Geometry) -> None:
    x, y = points(geometry), points(geometry, seed=1)
    v = geometry.log(x, y)
    assert torch.allclose(geometry.to_tangent(x, v), v, atol=2e-6)
    assert geometry.squared_distance(geometry.exp(x, v), y).sqrt().max() < 2e-6
    assert torch.allclose(v.square().sum(dim=-1), geometry.squared_distance(x, y), atol=1e-5)
    short = tangents(geometry, x, 0.3)
    assert torch.allclose(geometry.log(x, geometry.exp(x, short)), short, atol=1e-5)


@each
def test_distances_are_those_of_a_metric(geometry: Geometry) -> None:
    x, y, z = (points(geometry, seed=seed) for seed in range(3))
    one, two, three = (geometry.squared_distance(*pair).sqrt() for pair in ((x, y), (y, z), (x, z)))
    assert torch.allclose(one, geometry.squared_distance(y, x).sqrt())
    assert (three <= one + two + 1e-5).all()
    assert (geometry.squared_distance(x, x) == 0).all()


@each
def test_the_shortest_line(geometry: Geometry) -> None:
    """It starts and ends where it should, at constant speed, and its velocity is its derivative."""
    x, y = points(geometry), points(geometry, seed=1)
    length = geometry.squared_distance(x, y).sqrt()
    t = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(2))
    there, velocity = geometry.geodesic(x, y, t)
    assert torch.allclose(geometry.squared_distance(x, there).sqrt(), t[:, 0] * length, atol=1e-5)
    assert torch.allclose(geometry.squared_distance(y, there).sqrt(), (1 - t[:, 0]) * length, atol=1e-5)
    assert torch.allclose(velocity.norm(dim=-1), length, atol=1e-5)
    later, _ = geometry.geodesic(x, y, t + 1e-2)
    earlier, _ = geometry.geodesic(x, y, t - 1e-2)
    difference = (geometry.log(there, later) - geometry.log(there, earlier)) / 2e-2
    assert torch.allclose(difference, velocity, atol=1e-3)


@each
def test_parallel_transport(geometry: Geometry) -> None:
    """Lengths and angles stay, and the velocity of a line stays its velocity."""
    x, y = points(geometry), points(geometry, seed=1)
    y = geometry.exp(x, 0.9 * geometry.log(x, y))  # there are several lines between antipodes
    v, w = tangents(geometry, x, 1.0), geometry.log(x, y)
    moved_v, moved_w = geometry.transport(x, y, v), geometry.transport(x, y, w)
    assert torch.allclose((moved_v * moved_w).sum(dim=-1), (v * w).sum(dim=-1), atol=1e-4)
    assert torch.allclose(moved_w, -geometry.log(y, x), atol=1e-4)
    assert torch.allclose(geometry.transport(y, x, moved_v), v, atol=1e-4)


@each
def test_points_of_the_noise_and_projections_are_points(geometry: Geometry) -> None:
    z = torch.cat((torch.randn(1000, geometry.dim), torch.full((1, geometry.dim), 9.0)))
    noise = geometry.from_normal(z)
    assert Points(geometry).problem_with(noise) is None
    far = geometry.project(10 * torch.randn(1000, geometry.dim))
    assert Points(geometry).problem_with(far) is None
    assert torch.allclose(geometry.project(far), far)


def test_noise_is_uniform_on_sphere_and_torus() -> None:
    sphere, torus = points(Sphere(3), 40_000), points(FlatTorus(2), 40_000)
    assert torch.allclose(sphere.mean(dim=0), torch.zeros(3), atol=0.02)
    assert sphere[:, 2].abs().mean() == pytest.approx(0.5, abs=0.01), "heights are uniform (Archimedes)"
    assert torch.histc(torus[:, 0], 10, 0, 1).sub(4000).abs().max() < 250


def test_quarters_of_the_sphere() -> None:
    sphere, (x, y, z) = Sphere(3), torch.eye(3)
    assert sphere.squared_distance(x, y).sqrt() == pytest.approx(pi / 2)
    assert torch.allclose(sphere.log(x, y), pi / 2 * y)
    there, velocity = sphere.geodesic(x, y, torch.tensor(0.5))
    assert torch.allclose(there, (x + y) / 2**0.5)
    assert torch.allclose(velocity, pi / 2 * (y - x) / 2**0.5)
    assert torch.allclose(sphere.transport(x, y, x * 0 + z), z), "across the way, nothing changes"


@pytest.mark.parametrize("angle", [1e-4, 1e-2, 3.1, 3.1415])
def test_the_sphere_keeps_the_digits_of_near_points_and_of_antipodes(angle: float) -> None:
    sphere = Sphere(3)
    x = points(sphere)
    y = sphere.exp(x, tangents(sphere, x, angle))
    a, b = (each.double() / each.double().norm(dim=-1, keepdim=True) for each in (x, y))
    exact = 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
    tolerance = 1e-3 if angle == 1e-4 else 1e-5  # the points themselves are rounded by 6e-8
    assert torch.allclose(sphere.squared_distance(x, y).sqrt().double(), exact, rtol=tolerance)
    assert torch.allclose(sphere.log(x, y).norm(dim=-1).double(), exact, rtol=tolerance)


def test_antipodes_have_a_line() -> None:
    sphere = Sphere(3)
    x = torch.cat((points(sphere), torch.eye(3), -torch.eye(3)))
    v = sphere.log(x, -x)
    assert torch.allclose(v.norm(dim=-1), torch.tensor(pi))
    assert torch.allclose(sphere.exp(x, v), -x, atol=1e-6)
    there, velocity = sphere.geodesic(x, -x, torch.tensor(0.5))
    assert torch.allclose((there * x).sum(dim=-1), torch.zeros(len(x)), atol=1e-6)
    assert torch.allclose(velocity.norm(dim=-1), torch.tensor(pi))


def test_the_torus_goes_the_short_way_around() -> None:
    torus = FlatTorus(1)
    x, y = torch.tensor([[0.9], [0.1], [0.0], [0.25]]), torch.tensor([[0.1], [0.9], [0.5], [0.5]])
    assert torch.allclose(torus.log(x, y).abs().flatten(), torch.tensor([0.2, 0.2, 0.5, 0.25]))
    assert torch.allclose(torus.log(x, y)[:2].flatten(), torch.tensor([0.2, -0.2]))
    assert torus.exp(torch.tensor([[0.0]]), torch.tensor([[-1e-9]])).item() < 1, "1 is 0"


@each
def test_gradients_are_finite_everywhere(geometry: Geometry) -> None:
    x = torch.cat((points(geometry, 50), geometry.project(torch.eye(geometry.dim))))
    ends = [points(geometry, len(x), seed=1), x.clone(), geometry.project(-x)]
    for y in ends:
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        v = geometry.log(a, b)
        there, velocity = geometry.geodesic(a, b, torch.tensor(0.3))
        total = v.sum() + geometry.exp(a, v).sum() + geometry.squared_distance(a, b).sum() + (there * velocity).sum()
        for gradient in torch.autograd.grad(total, (a, b)):
            assert gradient.isfinite().all()


@each
def test_coordinates_tell_points_apart_smoothly(geometry: Geometry) -> None:
    x = points(geometry)
    near = geometry.exp(x, tangents(geometry, x, 1e-3))
    apart = (geometry.coordinates(x) - geometry.coordinates(near)).norm(dim=-1)
    assert apart.max() < 2e-2
    assert apart.min() > 5e-4
    assert geometry.coordinates(x).square().mean().sqrt() == pytest.approx(1, abs=0.2)
