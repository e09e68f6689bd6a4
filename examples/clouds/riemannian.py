"""Flows between clouds of points, along the geodesics of the plane, the sphere or the torus."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geometry import Geometry
from point_clouds import Points
from rectified_flow import Flow, register
from rectified_flow.condition import Values
from rectified_flow.flows import TimeGrid
from rectified_flow.flows.solvers import NO_GUIDANCE, Guidance, Velocity, Watch, guided, take_steps
from rectified_flow.flows.times import TimeDistribution, Uniform, time_grid
from transport import barycentric, cloud_costs, drawn_targets, sinkhorn

FixedStep = Literal["euler", "midpoint", "heun"]
PointCoupling = Literal["independent", "barycentric", "drawn"]


@register
class RiemannianFlow(Flow):
    """Flow matching along geodesics (Chen & Lipman 2023, arXiv:2302.03660), for clouds of points.

    Each point of a cloud comes from a point of noise along the shortest geodesic of ``space.geometry``. The network is
    called ``network(x, t, weights=weights, **conditions)``, and its output is projected onto the tangent space. In the
    plane and without weights, this is :class:`rectified_flow.RectifiedFlow`.

    A batch may have ``weights``, float32 ``[b, n]``, not negative, of any sum. They weight the points in the loss. A
    point of weight 0 is absent, whatever its coordinates.

    Args:
        network: the network; without weights in the batch, it is called without them.
        space: the space of the clouds.
        time_distribution: distribution of the training times; uniform by default. With coupled points, much is decided
            near the noise, where the times that suit pictures are rare.
        point_coupling: coupling of the points of a cloud with those of its noise: ``independent``, or by optimal
            transport (Haviv et al. 2024, arXiv:2411.00698) with the ``barycentric`` mean of a point's targets, or one
            target ``drawn`` from them.
        regularisation: regularisation of that transport, see :func:`transport.sinkhorn`. With 0.02, a quarter of the
            noise's 40 points is the target of none, and is missed where sampling starts; with 0.002, 8%.
        settings: settings of :class:`rectified_flow.Flow`. The coupling ``ot`` pairs whole clouds with noise.

    Raises:
        ValueError: if the coupling is ``immiscible``, which is defined in the plane only.
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
        """Draw noise and times for a batch and return the scalar loss; see :meth:`rectified_flow.Flow.draw_batch`."""
        x_0, noise, conditions = self.draw_batch(batch)
        weights = shares(batch["weights"]) if "weights" in batch else None
        start = self.couple(x_0, self.space.geometry.from_normal(noise), weights)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        return self.loss(x_0, start, t, conditions, weights)

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Values, weights: Tensor | None = None) -> Tensor:
        """Return the loss as a function of every random draw.

        Args:
            x_0: clouds ``[b, n, d]``.
            noise: points of noise ``[b, n, d]``, each coupled with the point of the cloud in its place.
            t: times ``[b]``.
            conditions: values by name.
            weights: weights of the points ``[b, n]`` with sum 1 in each row; None for equal weights.
        """
        x_t, velocity = self.space.geometry.geodesic(x_0, noise, t[:, None, None])
        squares = (self._velocity(x_t, t, weights, conditions) - velocity).square()
        if weights is None:
            return squares.flatten(1).mean(dim=1).mean()
        return (squares.mean(dim=2) * weights).sum(dim=1).mean()

    def couple(self, x_0: Tensor, noise: Tensor, weights: Tensor | None) -> Tensor:
        """Return the noise ``[b, n, d]`` coupled with each point of ``x_0``, whose weights are those of the loss."""
        if self.point_coupling == "independent":
            return noise
        geometry, w = self.space.geometry, equal_shares(x_0) if weights is None else weights
        plan = sinkhorn(geometry.squared_distance(x_0[:, :, None], noise[:, None]), w, w, **self._precision)
        if self.point_coupling == "barycentric":
            return barycentric(plan, x_0, noise, geometry)
        return noise.gather(1, drawn_targets(plan)[..., None].expand_as(noise))

    def pairing_costs(self, x_0: Tensor, noise: Tensor, batch: dict[str, Any]) -> Tensor:
        """Return the transport costs ``[b, b]`` of each cloud with the noise of each."""
        geometry, everywhere = self.space.geometry, equal_shares(noise)
        w = shares(batch["weights"]) if "weights" in batch else everywhere
        return cloud_costs(x_0, w, geometry.from_normal(noise), everywhere, geometry, **self._precision)

    @property
    def _precision(self) -> dict[str, Any]:
        """Settings of the transport. An error of a twentieth of the weight is small beside a step's random draws."""
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
        watch: Watch | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Generate clouds ``[b, n, d]`` of points on the geometry.

        Args:
            count: number of clouds, where no tensor has a number of rows.
            steps: intervals between noise and data.
            solver: method to cross an interval.
            grid: kind of the time grid.
            guidance: guidance towards the conditions.
            weights: weights of the points ``[b, n]``, of any sum; a point of weight 0 is absent.
            noise: standard normal ``[b, n, d]``; drawn if not given.
            watch: called with time and ``x`` at the start and after each interval.
            conditions: values by name ``[b, ...]``.

        Raises:
            ValueError: if the solver has no form on a geometry, or guidance has no conditions.
        """
        if solver not in STEPS:
            raise ValueError(f"the solver {solver} has no form on a geometry: take euler, midpoint or heun")
        count = count if weights is None else len(weights)
        z, values = self.draw_start(count, conditions, noise=noise)
        w = None if weights is None else shares(weights.to(z.device))

        def velocity(x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
            rows = w if w is None else w.repeat(len(x) // len(w), 1)  # guidance evaluates each row twice
            return self._velocity(x, t, rows, conditions)

        geometry = self.space.geometry
        with self.evaluating():
            field = guided(velocity, self.conditions, values, guidance)
            step = partial(STEPS[solver], geometry, field)
            x = take_steps(step, geometry.from_normal(z), time_grid(steps, grid), watch)
        return self.space.decode(x)

    def _velocity(self, x: Tensor, t: Tensor, weights: Tensor | None, conditions: Values) -> Tensor:
        given = conditions if weights is None else {**conditions, "weights": weights}
        return self.space.geometry.to_tangent(x, self.network(x, t, **given).float())


def _euler(geometry: Geometry, velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    return geometry.exp(x, (t_next - t) * velocity(x, t))


def _midpoint(geometry: Geometry, velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    dt = t_next - t
    middle = geometry.exp(x, dt / 2 * velocity(x, t))
    return geometry.exp(x, dt * geometry.transport(middle, x, velocity(middle, t + dt / 2)))


def _heun(geometry: Geometry, velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    dt, start = t_next - t, velocity(x, t)
    there = geometry.exp(x, dt * start)
    end = geometry.transport(there, x, velocity(there, t + dt))
    return geometry.exp(x, dt / 2 * (start + end))


STEPS: dict[FixedStep, Callable[..., Tensor]] = {"euler": _euler, "midpoint": _midpoint, "heun": _heun}
"""Solvers along geodesics. A velocity belongs to the tangent space of its point: it is transported in parallel to the
point where the step starts before it is used there."""


def shares(weights: Tensor) -> Tensor:
    """Scale weights ``[b, n]`` of any sum to sum 1 in each row, float32."""
    return weights.float() / weights.float().sum(dim=1, keepdim=True)


def equal_shares(x: Tensor) -> Tensor:
    """Return equal weights ``[b, n]`` of the points of clouds ``[b, n, d]``, with sum 1."""
    return x.new_full(x.shape[:2], 1 / x.shape[1])
