"""Flows between clouds of points, in the plane, on the sphere or on the torus."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geometry import Geometry
from points import Points
from rectified_flow.condition import Values
from rectified_flow.flows import TimeGrid
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import NO_GUIDANCE
from rectified_flow.flows.solvers import FixedStep, Guidance, Velocity, Watch, guided, integrate
from rectified_flow.flows.times import TimeDistribution, Uniform, time_grid
from rectified_flow.registry import register
from transport import barycentric, cloud_costs, drawn_targets, sinkhorn

PointCoupling = Literal["independent", "barycentric", "drawn"]


@register
class RiemannianFlow(Flow):
    """Flow matching along straightest lines (Chen & Lipman 2023, arXiv:2302.03660), for clouds of points.

    Each point of a cloud moves from a point of noise along the shortest line of ``space.geometry``. The network is
    called ``network(x, t, weights=weights, **conditions)``, and its output is projected to the tangent space. In the
    plane and without weights, this is :class:`RectifiedFlow`.

    A batch may have ``weights``, float32 ``[b, n]``, not negative: they weight the points in the loss, and a point of
    weight 0 is absent, whatever its coordinates.

    Args:
        network: see above; without weights, it is called without them.
        space: of the clouds.
        time_distribution: of the training times, uniform if not given. Where points are coupled, much is decided near
            the noise, which the times of pictures seldom see.
        point_coupling: which point of the noise each point comes from: any, or by optimal transport inside of the pair
            of clouds (Haviv et al. 2024, arXiv:2411.00698), ``barycentric`` the mean of those that the plan names, or
            ``drawn`` one of them.
        regularisation: of that transport, see :func:`sinkhorn <transport.sinkhorn>`. With 0.02, a
            quarter of the noise's points is drawn by none of 40, and they are missed where sampling starts; with the
            default, 8%.
        settings: those of :class:`Flow`; the coupling ``ot`` pairs whole clouds with noise, at the transport's cost.

    Raises:
        ValueError: if the coupling is ``immiscible``, which is for data without a geometry.
    """

    space: Points

    def __init__(
        self,
        network: nn.Module,
        *,
        space: Points,
        time_distribution: TimeDistribution | None = None,
        point_coupling: PointCoupling = "independent",
        regularisation: float = 0.002,
        **settings: Any,
    ) -> None:
        super().__init__(network, space=space, **settings)
        if self.coupling == "immiscible":
            raise ValueError("clouds of points are not coupled by immiscible: take ot or independent")
        self.time_distribution = time_distribution or Uniform()
        self.point_coupling, self.regularisation = point_coupling, regularisation

    def forward(self, **batch: Any) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss; see :meth:`Flow.draw_batch`."""
        x_0, noise, conditions = self.draw_batch(batch)
        weights = _shares_of(batch)
        start = self.couple(x_0, self.space.geometry.from_normal(noise), weights)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        return self.loss(x_0, start, t, conditions, weights)

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Values, weights: Tensor | None = None) -> Tensor:
        """The loss as a function of every draw.

        Args:
            x_0: clouds ``[b, n, d]``.
            noise: the point ``[b, n, d]`` that each comes from.
            t: times ``[b]``.
            conditions: by name.
            weights: ``[b, n]``, each row with sum 1; None weights all points alike.
        """
        x_t, truth = self.space.geometry.geodesic(x_0, noise, t[:, None, None])
        squares = (self._velocity(x_t, t, weights, conditions) - truth).square()
        if weights is None:
            return squares.flatten(1).mean(dim=1).mean()
        return (squares.mean(dim=2) * weights).sum(dim=1).mean()

    def couple(self, x_0: Tensor, noise: Tensor, weights: Tensor | None) -> Tensor:
        """The point of noise, ``[b, n, d]``, that each point of a cloud comes from; weights as of the loss."""
        if self.point_coupling == "independent":
            return noise
        geometry, w = self.space.geometry, equal_shares(x_0) if weights is None else weights
        cost = geometry.squared_distance(x_0[:, :, None], noise[:, None])
        plan = sinkhorn(cost, w, w, **self._precision)
        if self.point_coupling == "barycentric":
            return barycentric(plan, x_0, noise, geometry)
        return noise.gather(1, drawn_targets(plan)[..., None].expand_as(noise))

    def pairing_costs(self, x_0: Tensor, noise: Tensor, batch: dict[str, Any]) -> Tensor:
        weights = _shares_of(batch)
        geometry, everywhere = self.space.geometry, equal_shares(noise)
        w = everywhere if weights is None else weights
        return cloud_costs(x_0, w, geometry.from_normal(noise), everywhere, geometry, **self._precision)

    @property
    def _precision(self) -> dict[str, Any]:
        """Errors of a twentieth of a cloud's weight are nothing beside the draws of a step."""
        return {"regularisation": self.regularisation, "tolerance": 0.05, "max_iterations": 500}

    @torch.no_grad()
    def sample(
        self,
        count: int = 1,
        *,
        steps: int = 16,
        solver: FixedStep = "midpoint",
        grid: TimeGrid = "uniform",
        guidance: Guidance = NO_GUIDANCE,
        weights: Tensor | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
        watch: Watch | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Generate clouds ``[b, n, d]``, each point on the geometry.

        Args:
            count: how many, where no tensor has a number of rows.
            steps: intervals between noise and data.
            solver: how to cross an interval.
            grid: how the intervals are cut.
            guidance: pushes towards the conditions.
            weights: of the points ``[b, n]``, of any sum; a point of weight 0 is absent.
            noise: ``[b, n, d]``, standard normal; drawn if not given.
            generator: source of the draws, on the network's device.
            watch: called with time and ``x`` at the start and after each interval.
            conditions: values by name ``[b, ...]``.

        Raises:
            ValueError: as :meth:`RectifiedFlow.sample`, or if the solver follows no lines of a geometry.
        """
        if solver not in STEPS:
            raise ValueError(f"the solver {solver} knows no geometry: take euler, midpoint or heun")
        if guidance.scale != 1 and not self.conditions:
            raise ValueError("guidance needs a network that takes conditions")
        times, count = time_grid(steps, grid), count if weights is None else len(weights)
        z, values = self.draw_start(count, conditions, noise=noise, generator=generator)
        w = None if weights is None else shares(weights.to(z.device))

        def velocity(x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
            rows = w if w is None else w.repeat(len(x) // len(w), 1)  # guidance asks for each row twice
            return self._velocity(x, t, rows, conditions)

        with self.evaluating():
            field = guided(velocity, self.conditions, values, guidance)
            start = self.space.geometry.from_normal(z)
            x = integrate(field, start, times, watch=watch, step=partial(STEPS[solver], self.space.geometry))
        return self.space.decode(x)

    def _velocity(self, x: Tensor, t: Tensor, weights: Tensor | None, conditions: Values) -> Tensor:
        given = conditions if weights is None else {**conditions, "weights": weights}
        return self.space.geometry.to_tangent(x, self.network(x, t, **given).float())


def _euler(geometry: Geometry, velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    return geometry.exp(x, dt * velocity(x, t))


def _midpoint(geometry: Geometry, velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    middle = geometry.exp(x, dt / 2 * velocity(x, t))
    return geometry.exp(x, dt * geometry.transport(middle, x, velocity(middle, t + dt / 2)))


def _heun(geometry: Geometry, velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    start = velocity(x, t)
    there = geometry.exp(x, dt * start)
    end = geometry.transport(there, x, velocity(there, t + dt))
    return geometry.exp(x, dt / 2 * (start + end))


STEPS: dict[FixedStep, Callable[..., Tensor]] = {"euler": _euler, "midpoint": _midpoint, "heun": _heun}
"""The solvers along geodesics: a velocity is transported in parallel to the point where it is used."""


def shares(weights: Tensor) -> Tensor:
    """Weights ``[b, n]`` of any sum, as float32 with sum 1 in each row."""
    return weights.float() / weights.float().sum(dim=1, keepdim=True)


def equal_shares(x: Tensor) -> Tensor:
    """Weights of clouds ``[b, n, d]`` whose points count alike, with sum 1."""
    return x.new_full(x.shape[:2], 1 / x.shape[1])


def _shares_of(batch: dict[str, Any]) -> Tensor | None:
    return shares(batch["weights"]) if "weights" in batch else None
