"""Gaussian data, for which the velocity, the flow map and the lowest possible loss are known in closed form.

For data N(mu, diag(lam)) and ``x_t = (1 - t) x_0 + t noise``, with ``V(t) = (1 - t)^2 lam + t^2``:
the velocity is ``-mu + (t - (1 - t) lam) / V(t) * (x - (1 - t) mu)``, the flow map to time r is
``(1 - r) mu + sqrt(V(r) / V(t)) * (x - (1 - t) mu)``, and no predictor's squared error is below ``sum(lam / V(t))``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Gaussian:
    mean: Tensor
    variance: Tensor

    def sample(self, count: int) -> Tensor:
        return self.mean + self.variance.sqrt() * torch.randn(count, *self.mean.shape, dtype=self.mean.dtype)

    def marginal(self, t: Tensor) -> Tensor:
        return (1 - t) ** 2 * self.variance + t**2

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        gain = (t - (1 - t) * self.variance) / self.marginal(t)
        return -self.mean + gain * (x - (1 - t) * self.mean)

    def flow_map(self, x: Tensor, t: float, r: float) -> Tensor:
        times = torch.tensor([t, r], dtype=x.dtype)
        ratio = self.marginal(times[1]) / self.marginal(times[0])
        return (1 - r) * self.mean + ratio.sqrt() * (x - (1 - t) * self.mean)

    def average_velocity(self, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
        """(x - flow_map(x, t, r)) / (t - r), in a form that is also valid at r = t."""
        at_t, at_r = self.marginal(t), self.marginal(r)
        gain = (t + r - self.variance * (2 - t - r)) / (at_t + (at_t * at_r).sqrt())
        return -self.mean + gain * (x - (1 - t) * self.mean)

    def float(self) -> "Gaussian":
        return Gaussian(self.mean.float(), self.variance.float())

    def clean(self, x: Tensor, t: Tensor) -> Tensor:
        """E[x_0 | x_t = x]."""
        return self.mean + (1 - t) * self.variance / self.marginal(t) * (x - (1 - t) * self.mean)

    def noise(self, x: Tensor, t: Tensor) -> Tensor:
        """E[noise | x_t = x]."""
        return t / self.marginal(t) * (x - (1 - t) * self.mean)

    def floor(self, t: Tensor) -> Tensor:
        """The lowest possible mean squared error of a velocity, averaged over elements, at times ``t`` ``[b]``."""
        times = t.reshape(-1, *[1] * self.mean.ndim)
        return (self.variance / self.marginal(times)).flatten(1).mean(dim=1)


def image_gaussian() -> Gaussian:
    """A Gaussian over images ``[3, 4, 4]``; each element has its own mean and variance."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.rand(3, 4, 4, generator=generator, dtype=torch.float64) - 0.5
    variance = 0.02 + 0.5 * torch.rand(3, 4, 4, generator=generator, dtype=torch.float64)
    return Gaussian(mean, variance)


class Optimal(nn.Module):
    """The best possible network, plus two parameters that are zero there: an offset and a gain."""

    def __init__(self, data: Gaussian, prediction: str) -> None:
        super().__init__()
        self.best = {"velocity": data.velocity, "clean": data.clean, "noise": data.noise}[prediction]
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.gain = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        value = self.best(x, t.reshape(-1, 1, 1, 1))
        return value + self.offset + self.gain * x
