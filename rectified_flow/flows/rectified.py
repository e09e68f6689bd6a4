"""Rectified flow: learn the velocity of straight paths from data to noise, then integrate it back."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow.arguments import checked
from rectified_flow.condition import Values
from rectified_flow.errors import UsageError
from rectified_flow.flows import Distance, Prediction, Solver, Steps, Strength, TimeGrid
from rectified_flow.flows.flow import FLOW_NEEDS, Flow, expand
from rectified_flow.flows.solvers import NO_GUIDANCE, Guidance, Watch, guided, integrate
from rectified_flow.flows.times import LogitNormal, TimeDistribution, time_grid
from rectified_flow.registry import register

MIN_DIVISOR = 0.05
"""Clean and noise predictions divide by t or 1 - t in the loss; published x-prediction clips it (arXiv:2511.13720)."""
LATEST = 1 - 1 / 64
"""Latest time at which sampling evaluates a noise prediction: later, its error is divided by almost 0."""


@register(role="flow", needs=(*FLOW_NEEDS, "prediction", "time_distribution"))
class RectifiedFlow(Flow):
    """Rectified flow (Liu et al. 2022, arXiv:2209.03003, eq. 1).

    Args:
        network: called ``network(x, t, **conditions)``.
        prediction: the meaning of the network's output. The loss is that of the velocity for each of them.
        time_distribution: distribution of the training times.
        distance: ``mse``, or ``pseudo_huber`` with the constant for reflow (Lee et al. 2024, arXiv:2405.20320, section
            4.2), here of the mean over elements instead of the sum.
        guided_data: whether guidance generated the training data, so that samples need none by default.
        settings: further arguments of :class:`Flow`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        prediction: Prediction = "velocity",
        time_distribution: TimeDistribution | None = None,
        distance: Distance = "mse",
        guided_data: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.prediction = prediction
        self.time_distribution = time_distribution or LogitNormal()
        self.distance = distance
        self.guided_data = guided_data

    @property
    @override
    def default_guidance(self) -> float:
        """The guidance scale of programs unless a flag sets it: the largest default of the conditions."""
        if self.guided_data:
            return 1.0
        return max((getattr(kind, "guidance", 1.0) for kind in self.conditions.values()), default=1.0)

    @property
    @override
    def default_grid(self) -> TimeGrid:
        """The spacing of the times of :meth:`sample` if a caller gives none (docs/measurements/quality.md)."""
        return "edm" if self.space.medium.codec else "uniform"

    def forward(self, **batch: Tensor) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss; see :meth:`Flow.draw_batch`."""
        x_0, noise, conditions = self.draw_batch(batch)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        return self.loss(x_0, noise, t, conditions)

    @override
    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Values) -> Tensor:
        """Return the loss, given every draw: ``x_0``, ``noise`` ``[b, ...]``, ``t`` ``[b]``, conditions by name."""
        x_0, weights = self.masked(x_0)
        times = expand(t, x_0)
        x_t = (1 - times) * x_0 + times * noise
        truth = {"velocity": noise - x_0, "clean": x_0, "noise": noise}[self.prediction]
        error = self.velocity(x_t, t, **conditions) - self._as_velocity(truth, x_t, t)
        error = error if weights is None else error * weights
        mean_square = error.square().flatten(1).mean(dim=1)
        if self.distance == "mse":
            return mean_square.mean()
        c = 0.00054 * x_0[0].numel() ** 0.5
        return ((mean_square + c**2).sqrt() - c).mean()

    @override
    def velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        return self._as_velocity(self.predict(x, t, **conditions), x, t)

    def exact_velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        """Return the velocity without clipped divisors, for any time but 0, where a clean prediction has none."""
        t = t.clamp(max=LATEST) if self.prediction == "noise" else t
        return self._as_velocity(self.predict(x, t, **conditions), x, t, least=0.0)

    @torch.no_grad()
    @checked
    @override
    def sample(
        self,
        count: int = 1,
        *,
        steps: Steps = 16,
        solver: Solver = "ab2",
        grid: TimeGrid | None = None,
        guidance: Guidance = NO_GUIDANCE,
        start: Tensor | None = None,
        strength: Strength = 1.0,
        mask: Tensor | None = None,
        noise: Tensor | None = None,
        watch: Watch | None = None,
        decode: bool = True,
        **conditions: Any,
    ) -> Tensor:
        """Generate data as the space decodes them; with :class:`Pixels` float32 ``[b, c, h, w]`` in [0, 1].

        Args:
            count: number of samples if no tensor is given.
            steps: intervals between noise and data; the solver decides the network calls in each.
            solver: ODE solver, see :func:`integrate`.
            grid: spacing of the times, see :func:`time_grid`; by default that of ``default_grid``.
            guidance: classifier-free guidance, which doubles the rows of a network call.
            start: data ``[b, ...]`` to start from, as the space stores them, with noise up to ``strength``.
            strength: the time to start at, with ``start``.
            mask: bool ``[b, 1, h, w]``, true where data are generated; the rest is that of ``start``.
            noise: ``[b, ...]``, standard normal; drawn if not given.
            watch: called with time and ``x`` at the start and after each interval.
            decode: decode the samples; if False, return ``x``.
            conditions: tensors of values by name ``[b, ...]``; labels that are not given are drawn uniformly.

        Raises:
            ValueError: if an argument makes no sense, guidance has no conditions to work with, or the solver renews
                noise on paths from sources.
        """
        if self.from_source and solver == "stochastic":
            raise UsageError("`solver` stochastic is for paths from noise, not from a source: choose another solver")
        times = time_grid(steps, grid or self.default_grid, strength if start is not None else 1.0)
        x, values = self.draw_start(count, conditions, noise=noise, start=start, strength=strength)
        field = guided(self.exact_velocity, self.conditions, values, guidance)
        with self.evaluating():
            at_data, inpaint = self.prediction != "clean", self.inpainting(start, mask, x, times[0])
            x = integrate(field, x, times, solver, watch=watch, inpaint=inpaint, evaluate_at_data=at_data)
        return self.space.decode(x) if decode else x

    def _as_velocity(self, value: Tensor, x: Tensor, t: Tensor, least: float = MIN_DIVISOR) -> Tensor:
        """Return the velocity of a prediction, whose divisor is at least ``least``."""
        if self.prediction == "velocity":
            return value
        times = expand(t, x)
        if self.prediction == "clean":
            return (x - value) / times.clamp(min=least)
        return (value - x) / (1 - times).clamp(min=least)
