"""Rectified flow: learn the velocity of straight paths from data to noise, then integrate it back."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.flows.images import random_horizontal_flip, to_signed, to_unit
from rectified_flow.flows.solvers import Solver, integrate
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution

Prediction = Literal["velocity", "clean", "noise"]
Loss = Literal["mse", "pseudo_huber"]


class RectifiedFlow(nn.Module):
    """Rectified flow (Liu et al. 2022, arXiv:2209.03003, eq. 1).

    Time is the noise level: ``x_t = (1 - t) x_0 + t noise``, and the velocity is ``noise - x_0``.

    Args:
        network: called ``network(x, t, labels=labels)``, or ``network(x, t)`` if it has no ``num_classes``.
        prediction: what the network's output means. The loss is that of the velocity for each of them.
        time_distribution: where training times come from.
        loss: ``mse``, or ``pseudo_huber`` (Song & Dhariwal 2023, arXiv:2310.14189, eq. 11).
        label_dropout: probability of training a row without its label (Ho & Salimans 2022, arXiv:2207.12598).
        horizontal_flip: mirror half of the training images.
        image_shape: ``(c, h, w)`` to sample; remembered from the first training batch if not given.
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
        label_dropout: float = 0.0,
        horizontal_flip: bool = False,
        image_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.num_classes: int | None = getattr(network, "num_classes", None)
        self.prediction = prediction
        self.time_distribution = time_distribution or LogitNormal()
        self.loss = loss
        self.label_dropout = label_dropout
        self.horizontal_flip = horizontal_flip
        self.image_shape = image_shape

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Draw noise and times for a batch and return the scalar loss.

        Args:
            images: uint8 ``[b, c, h, w]``, or floating point in [-1, 1].
            labels: int64 ``[b]``; ignored by a network without classes.
        """
        x_0 = to_signed(images)
        self.image_shape = self.image_shape or tuple(x_0.shape[1:])
        if self.horizontal_flip:
            x_0 = random_horizontal_flip(x_0)
        noise = randomness.randn("noise", x_0.shape, x_0.device)
        t = self.time_distribution.sample(len(x_0), x_0.device)
        return self.objective(x_0, noise, t, self._drop_labels(labels))

    def objective(self, x_0: Tensor, noise: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss as a function of every draw: ``x_0`` and ``noise`` ``[b, ...]``, ``t`` and ``labels`` ``[b]``."""
        times = _expand(t, x_0)
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
        output = self.network(x, t) if self.num_classes is None else self.network(x, t, labels=labels)
        return self._as_velocity(output.float(), x, t)

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
        if steps < 1:
            raise ValueError(f"steps is {steps}; sampling needs at least 1")
        device = next(self.network.parameters()).device
        batch_size = len(noise) if noise is not None else len(labels) if labels is not None else batch_size
        if noise is None:
            noise = self._draw_noise(batch_size, device, generator)
        if labels is None and self.num_classes is not None:
            labels = _draw_labels(self.num_classes, batch_size, device, generator)

        def velocity(x: Tensor, t: float) -> Tensor:
            return self.velocity(x, x.new_full((len(x),), t), labels)

        times = torch.linspace(1, 0, steps + 1).tolist()
        was_training = self.training
        self.eval()
        try:
            return to_unit(integrate(velocity, noise.float(), times, solver))
        finally:
            self.train(was_training)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the objective in place, its draws left outside; no saved name changes."""
        self.objective = torch.compile(self.objective, *args, **kwargs)  # type: ignore[method-assign]

    def _as_velocity(self, value: Tensor, x: Tensor, t: Tensor) -> Tensor:
        times = _expand(t, x)
        if self.prediction == "clean":
            return (x - value) / times.clamp(min=self.min_divisor)
        if self.prediction == "noise":
            return (value - x) / (1 - times).clamp(min=self.min_divisor)
        return value

    def _drop_labels(self, labels: Tensor | None) -> Tensor | None:
        if labels is None or self.num_classes is None or self.label_dropout == 0:
            return labels
        dropped = randomness.rand("label dropout", labels.shape, labels.device) < self.label_dropout
        return labels.masked_fill(dropped, self.num_classes)

    def _draw_noise(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        if self.image_shape is None:
            raise ValueError("the flow does not know its image shape yet: give noise, or image_shape when building it")
        shape = (count, *self.image_shape)
        if generator is not None:
            return torch.randn(shape, device=device, generator=generator)
        return randomness.randn("sample noise", shape, device)


def _draw_labels(num_classes: int, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        return torch.randint(num_classes, (count,), device=device, generator=generator)
    return randomness.randint("sample labels", num_classes, (count,), device)


def _expand(t: Tensor, x: Tensor) -> Tensor:
    """``t`` ``[b]`` with trailing ones, to multiply ``x`` ``[b, ...]``."""
    return t.reshape(-1, *[1] * (x.ndim - 1))
