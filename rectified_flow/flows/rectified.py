"""Rectified flow: learn the velocity of straight paths from data to noise, then integrate it back."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rectified_flow.flows.flow import Flow, expand
from rectified_flow.flows.guidance import Guidance, guided
from rectified_flow.flows.images import to_signed, to_unit
from rectified_flow.flows.solvers import Solver, Velocity, Watch, default_noise, integrate
from rectified_flow.flows.time_grids import TimeGrid, time_grid
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution

Prediction = Literal["velocity", "clean", "noise"]
Loss = Literal["mse", "pseudo_huber"]
NO_GUIDANCE = Guidance()


class RectifiedFlow(Flow):
    """Rectified flow (Liu et al. 2022, arXiv:2209.03003, eq. 1).

    Args:
        network: called ``network(x, t)``, with ``labels`` if it has ``num_classes``.
        prediction: what the network's output means. The loss is that of the velocity for each of them.
        time_distribution: where training times come from.
        loss: ``mse``, or ``pseudo_huber`` with the constant for reflow (Lee et al. 2024, arXiv:2405.20320, section
            4.2), here of the mean over pixels instead of the sum.
        settings: those of :class:`Flow`.
    """

    settings: ClassVar[tuple[str, ...]] = (*Flow.settings, "prediction", "time_distribution", "loss")
    default_steps = 16
    # Clean and noise predictions divide by t or 1 - t; published x-prediction clips there too (arXiv:2511.13720).
    min_divisor = 0.05

    def __init__(
        self,
        network: nn.Module,
        *,
        prediction: Prediction = "velocity",
        time_distribution: TimeDistribution | None = None,
        loss: Loss = "mse",
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.prediction = prediction
        self.time_distribution = time_distribution or LogitNormal()
        self.loss = loss

    def forward(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        noise_rows: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss.

        Args:
            images: uint8 ``[b, c, h, w]``, or floating point in [-1, 1].
            labels: int64 ``[b]``; ignored by a network without classes.
            noise_rows: int64 ``[b]``, the rows of the global batch's noise that :meth:`pair` chose.
            noise: ``[b, c, h, w]`` that belongs to the images (reflow; section 2.2 of the paper); drawn if not given.
        """
        x_0, noise, labels = self._draw_batch(images, labels, noise_rows, noise)
        t = self.time_distribution.sample(len(x_0), x_0.device)
        return self.objective(x_0, noise, t, labels)

    def objective(self, x_0: Tensor, noise: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss as a function of every draw: ``x_0`` and ``noise`` ``[b, ...]``, ``t`` and ``labels`` ``[b]``."""
        times = expand(t, x_0)
        x_t = (1 - times) * x_0 + times * noise
        truth = {"velocity": noise - x_0, "clean": x_0, "noise": noise}[self.prediction]
        error = self.velocity(x_t, t, labels) - self._as_velocity(truth, x_t, t)
        mean_square = error.square().flatten(1).mean(dim=1)
        if self.loss == "mse":
            return mean_square.mean()
        c = 0.00054 * x_0[0].numel() ** 0.5
        return ((mean_square + c**2).sqrt() - c).mean()

    def velocity(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The predicted velocity at ``x`` ``[b, ...]`` and times ``t`` ``[b]``, in float32."""
        return self._as_velocity(self._call(x, t, labels), x, t)

    @torch.no_grad()
    def sample(
        self,
        batch_size: int = 1,
        *,
        steps: int = 16,
        solver: Solver = "midpoint",
        grid: TimeGrid = "uniform",
        labels: Tensor | None = None,
        guidance: Guidance = NO_GUIDANCE,
        images: Tensor | None = None,
        noise_level: float = 1.0,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Generate images, float32 ``[b, c, h, w]`` in [0, 1].

        Args:
            batch_size: how many, where no tensor says so.
            steps: intervals between noise and image; the solver decides the network calls in each.
            solver: how to cross an interval.
            grid: how the intervals are cut.
            labels: int64 ``[b]``; drawn uniformly if a conditional network is given none.
            guidance: pushes towards the labels; one network call all the same, on twice the rows.
            images: ``[b, c, h, w]``, uint8 or in [-1, 1], to start from, with noise up to ``noise_level``.
            noise_level: the time to start at.
            noise: ``[b, c, h, w]``, standard normal; drawn if not given.
            generator: source of what is drawn, on the network's device.
            watch: called with time and ``x`` at the start and after each interval.

        Raises:
            ValueError: if ``steps`` is not positive, the noise level not in (0, 1], guidance has no labels, or the flow
                has not seen an image shape yet.
        """
        times = time_grid(steps, grid, noise_level if images is not None else 1.0)
        x, labels = self._draw_start(batch_size, labels, noise, generator, images, noise_level)

        def fresh_noise(x: Tensor, t: float) -> Tensor:
            if generator is None:
                return default_noise(x, t)
            return torch.randn(x.shape, device=x.device, generator=generator)

        with self._evaluating():
            field = self._field(labels, guidance)
            return to_unit(integrate(field, x, times, solver, fresh_noise=fresh_noise, watch=watch))

    @torch.no_grad()
    def encode(
        self,
        images: Tensor,
        *,
        steps: int = 16,
        solver: Solver = "midpoint",
        grid: TimeGrid = "uniform",
        labels: Tensor | None = None,
        guidance: Guidance = NO_GUIDANCE,
    ) -> Tensor:
        """The noise ``[b, c, h, w]`` from which ``sample`` with the same settings comes back to ``images``.

        Args:
            images: ``[b, c, h, w]``, uint8 or in [-1, 1].
            steps: intervals.
            solver: any but ``stochastic``, which has no way back.
            grid: how the intervals are cut.
            labels: int64 ``[b]``.
            guidance: as in sampling.

        Raises:
            ValueError: if ``steps`` is not positive, the solver has no way back, or guidance has no labels.
        """
        if solver == "stochastic":
            raise ValueError("the stochastic solver has no way back to the noise")
        if labels is None and guidance.scale != 1:
            raise ValueError("guidance needs the labels of the images")
        x = to_signed(images).to(next(self.network.parameters()).device)
        labels = None if labels is None else labels.to(x.device)
        with self._evaluating():
            return integrate(self._field(labels, guidance), x, time_grid(steps, grid)[::-1], solver)

    def _field(self, labels: Tensor | None, guidance: Guidance) -> Velocity:
        if guidance.scale != 1 and self.num_classes is None:
            raise ValueError("guidance needs a network with num_classes")
        return guided(self.velocity, labels, self.num_classes or 0, guidance)

    def _as_velocity(self, value: Tensor, x: Tensor, t: Tensor) -> Tensor:
        times = expand(t, x)
        if self.prediction == "clean":
            return (x - value) / times.clamp(min=self.min_divisor)
        if self.prediction == "noise":
            return (value - x) / (1 - times).clamp(min=self.min_divisor)
        return value
