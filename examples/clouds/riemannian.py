"""Flows between clouds of points, along the geodesics of the plane, the sphere or the torus."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geometry import Geometry
from point_clouds import Points, draw_by_point, equal_shares, pad, shares, trim
from rectified_flow import Flow, Labels, UsageError, randomness, register
from rectified_flow.condition import Values
from rectified_flow.flows import TimeGrid
from rectified_flow.flows.couplings import optimal_pairs
from rectified_flow.flows.flow import FLOW_NEEDS
from rectified_flow.flows.solvers import NO_GUIDANCE, Guidance, Velocity, Watch, guided, take_steps
from rectified_flow.flows.times import TimeDistribution, Uniform, time_grid
from transport import REGULARISATION, barycentric, cloud_costs, drawn_targets, plans

FixedStep = Literal["euler", "midpoint", "heun"]
PointCoupling = Literal["independent", "barycentric", "drawn"]


@register(role="flow", needs=(*FLOW_NEEDS, "time_distribution"))
class RiemannianFlow(Flow):
    """Flow matching along geodesics (Chen & Lipman 2023, arXiv:2302.03660), for clouds of points.

    Each point of a cloud comes from a point of noise along the shortest geodesic of ``space.geometry``. The network is
    called ``network(x, t, weights=weights, **conditions)``, and its output is projected onto the tangent space. In the
    plane and without weights, this is :class:`rectified_flow.RectifiedFlow`.

    A batch may have ``weights``, float32 ``[b, n]``, not negative, of any sum. They weight the points in the loss. A
    point of weight 0 is padding: neither its coordinates nor the number of such points change the loss or a sample.

    Args:
        network: the network; without weights in the batch, it is called without them.
        space: the space of the clouds.
        time_distribution: distribution of the training times; uniform by default. With coupled points, much is decided
            near the noise, where the times that suit pictures are rare.
        point_coupling: coupling of the points of a cloud with those of its noise: ``independent``, or by entropic
            optimal transport (Haviv et al. 2024, arXiv:2411.00698) with the ``barycentric`` mean of a point's targets,
            or one target ``drawn`` from them.
        regularisation: regularisation of that transport, see :func:`transport.plans`.
        settings: settings of :class:`rectified_flow.Flow`. The coupling ``ot`` pairs whole clouds with noise, within
            each class. (It does not compare vectors: hardly two clouds of a batch have the same one.)

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
        regularisation: float = REGULARISATION,
        **settings: Any,
    ) -> None:
        super().__init__(network, space=space, **settings)
        if self.coupling == "immiscible":
            raise ValueError("clouds of points are not coupled by immiscible: take ot or independent")
        self.time_distribution = time_distribution or Uniform()
        self.point_coupling, self.regularisation = point_coupling, regularisation

    def forward(self, **batch: Any) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss; see :meth:`rectified_flow.Flow.draw_batch`."""
        if "noise" not in batch and ("weights" in batch or self.coupling == "ot"):
            batch = batch | {"noise": self._draw_noise_of(batch)}
        x_0, z, conditions = self.draw_batch(batch)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        weights = shares(batch["weights"]) if "weights" in batch else None
        if weights is not None:
            weights, x_0, z = trim(weights, x_0, z)
        start = self.couple(x_0, self.space.geometry.from_normal(z), weights)
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
        squares = (self.velocity(x_t, t, weights, **conditions) - velocity).square()
        if weights is None:
            return squares.flatten(1).mean(dim=1).mean()
        return (squares.mean(dim=2) * weights).sum(dim=1).mean()

    def velocity(self, x: Tensor, t: Tensor, weights: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Return the predicted velocity at ``x``, in the tangent space."""
        given = conditions if weights is None else {**conditions, "weights": weights}
        return self.space.geometry.to_tangent(x, self.network(x, t, **given).float())

    # Couplings

    def couple(self, x_0: Tensor, noise: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the noise ``[b, n, d]`` coupled with each point of ``x_0``; both have the weights of the loss."""
        if self.point_coupling == "independent":
            return noise
        geometry, w = self.space.geometry, equal_shares(x_0) if weights is None else weights
        plan = plans(geometry.squared_distance(x_0[:, :, None], noise[:, None]), w, w, self.regularisation)
        if self.point_coupling == "barycentric":
            return barycentric(plan, x_0, noise, geometry)
        return noise.gather(1, drawn_targets(plan)[..., None].expand_as(noise))

    def pair(self, **batch: Any) -> Tensor:
        """Return the row of noise for each cloud of a global batch, int64 ``[b]``, at the least cost of transport."""
        return self._pairs(self._standard_normal(batch), batch)

    def _pairs(self, z: Tensor, batch: dict[str, Any]) -> Tensor:
        geometry, x_0 = self.space.geometry, self.space.encode(batch[self.space.key])
        weights, x_0, z = trim(shares(batch["weights"]) if "weights" in batch else equal_shares(x_0), x_0, z)
        noise, groups = geometry.from_normal(z), self._groups(batch, len(z))
        rows, columns = (groups[:, None] == groups).nonzero().unbind(dim=1)  # the other costs are not compared
        w, costs = weights[rows], z.new_zeros(len(z), len(z))
        costs[rows, columns] = cloud_costs(x_0[rows], w, noise[columns], w, geometry)
        return optimal_pairs(costs, groups)

    def _groups(self, batch: dict[str, Any], count: int) -> Tensor:
        """Return numbers ``[b]`` that are equal for clouds of the same classes."""
        names = [name for name, kind in self.conditions.items() if isinstance(kind, Labels) and name in batch]
        if not names:
            return torch.zeros(count, dtype=torch.long, device=self.device)
        classes = torch.stack([batch[name] for name in names], dim=1)
        return classes.unique(dim=0, return_inverse=True)[1]

    def _draw_noise_of(self, batch: dict[str, Any]) -> Tensor:
        """Draw standard normal numbers ``[b, n, d]``, paired with the clouds of a batch if the coupling is ``ot``."""
        z = self._standard_normal(batch)
        if self.coupling == "ot" and "noise_rows" not in batch:  # no global batch: pair the clouds of this one
            return z[self._pairs(z, batch)]
        return z

    def _standard_normal(self, batch: dict[str, Any]) -> Tensor:
        clouds: Tensor = batch[self.space.key]
        draw = partial(randomness.randn, device=clouds.device, global_rows=batch.get("noise_rows"))
        return draw_by_point(draw, "noise", clouds.shape) if "weights" in batch else draw("noise", clouds.shape)

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
            weights: weights of the points ``[b, n]``, of any sum. A point of weight 0 is a copy of the first point.
            noise: standard normal ``[b, n, d]``; drawn if not given.
            watch: called with time and ``x`` at the start and after each interval.
            conditions: values by name ``[b, ...]``.

        Raises:
            UsageError: if the solver has no form on a geometry.
            ValueError: if guidance has no conditions.
        """
        if solver not in STEPS:
            raise UsageError(f"--solver {solver} has no form on a geometry: pass {', '.join(STEPS)}")
        geometry, size, w = self.space.geometry, None, None
        if weights is not None and noise is None:
            draw = partial(randomness.randn, device=self.device)
            noise = draw_by_point(draw, "sample noise", (*weights.shape, geometry.dim))
        z, values = self.draw_start(count, conditions, noise=noise)
        if weights is not None:
            size = z.shape[1]
            w, z = trim(shares(weights.to(z.device)), z)

        def velocity(x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
            rows = w if w is None else w.repeat(len(x) // len(w), 1)  # guidance evaluates each row twice
            return self.velocity(x, t, rows, **conditions)

        with self.evaluating():
            field = guided(velocity, self.conditions, values, guidance)
            step = partial(STEPS[solver], geometry, field)
            x = take_steps(step, geometry.from_normal(z), time_grid(steps, grid), watch)
        return self.space.decode(x if w is None or size is None else pad(trim(w, x)[1], size))


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
