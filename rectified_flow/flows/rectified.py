"""Rectified flow: learn the velocity of straight paths from data to noise, then integrate it back."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from rectified_flow.flows.flow import Flow, expand, time_grid
from rectified_flow.flows.images import to_unit
from rectified_flow.flows.solvers import Solver, integrate
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution

Prediction = Literal["velocity", "clean", "noise"]
Loss = Literal["mse", "pseudo_huber"]


class RectifiedFlow(Flow):
    """Rectified flow (Liu et al. 2022, arXiv:2209.03003, eq. 1).

    Args:
        network: called ``network(x, t)``, with ``labels`` if it has ``num_classes``.
        prediction: what the network's output means. The loss is that of the velocity for each of them.
        time_distribution: where training times come from.
        loss: ``mse``, or ``pseudo_huber`` (Song & Dhariwal 2023, arXiv:2310.14189, eq. 11).
        settings: those of :class:`Flow`.
    """

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

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss.

        Args:
            images: uint8 ``[b, c, h, w]``, or floating point in [-1, 1].
            labels: int64 ``[b]``; ignored by a network without classes.
        """
        x_0, noise, labels = self._draw_batch(images, labels)
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
        c = 0.00054
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
        labels: Tensor | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Generate images, float32 ``[b, c, h, w]`` in [0, 1].

        Args:
            batch_size: how many, where neither ``labels`` nor ``noise`` says so.
            steps: intervals between noise and image; the solver decides the network calls in each.
            solver: how to cross an interval.
            labels: int64 ``[b]``; drawn uniformly if a conditional network is given none.
            noise: ``[b, c, h, w]`` to start from, standard normal; drawn if not given.
            generator: source of what is drawn, on the network's device.

        Raises:
            ValueError: if ``steps`` is not positive, or the flow has not seen an image shape yet.
        """
        times = time_grid(steps)
        noise, labels = self._draw_start(batch_size, labels, noise, generator)

        def velocity(x: Tensor, t: float) -> Tensor:
            return self.velocity(x, x.new_full((len(x),), t), labels)

        with self._evaluating():
            return to_unit(integrate(velocity, noise, times, solver))

    def _as_velocity(self, value: Tensor, x: Tensor, t: Tensor) -> Tensor:
        times = expand(t, x)
        if self.prediction == "clean":
            return (x - value) / times.clamp(min=self.min_divisor)
        if self.prediction == "noise":
            return (value - x) / (1 - times).clamp(min=self.min_divisor)
        return value
