"""Distributions of the training time t in [0, 1], as one family on the logit axis.

The family includes the logit-normal distribution and the resolution shift ``t' = s t / (1 + (s - 1) t)`` (Esser et al.
2024, arXiv:2403.03206, sections 3.1 and 5.3.2): the shift adds ``log s`` to the logit.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import log, sinh

import torch
from torch import Tensor
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.flows import TimeGrid
from rectified_flow.registry import register


class TimeDistribution(ABC):
    """A distribution of the times at which a flow is trained. Register a subclass, and checkpoints can name it."""

    @abstractmethod
    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        """Draw times ``[count]`` in [0, 1] with :mod:`rectified_flow.randomness`, in the stream named ``purpose``."""


@register
@dataclass(frozen=True)
class Uniform(TimeDistribution):
    """Uniform times; a ``shift`` above 1 moves them towards the noise."""

    shift: float = 1.0

    @override
    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        t = randomness.rand(purpose, (count,), device)
        return self.shift * t / (1 + (self.shift - 1) * t)


@register
@dataclass(frozen=True)
class LogitNormal(TimeDistribution):
    """Times whose logit is normal with mean ``mean + log(shift)`` and standard deviation ``std``.

    The default extrapolates published settings, (-1.2, 1.2) at 32 px and (0.8, 0.8) at 256 px, to 64 px. If
    ``stratified``, the rows of a batch have times from as many equally probable ranges, so that the loss of a small
    batch varies less (Kingma et al. 2021, arXiv:2107.00630).
    """

    mean: float = -0.5
    std: float = 1.2
    shift: float = 1.0
    stratified: bool = False

    @override
    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        if self.stratified:
            z = _normal_quantiles(randomness.strata(purpose, count, device))
        else:
            z = randomness.randn(purpose, (count,), device)
        return torch.sigmoid(z * self.std + self.mean + log(self.shift))


def _normal_quantiles(u: Tensor) -> Tensor:
    try:
        return torch.special.ndtri(u)
    except NotImplementedError:  # MPS has no kernel of it
        return 2**0.5 * torch.erfinv(2 * u - 1)


@register
@dataclass(frozen=True)
class UShaped(TimeDistribution):
    """Times near both ends, with density proportional to ``cosh(steepness (t - 1/2))``.

    Suited to pairs whose paths are already straight, where only the two ends are hard (Lee et al. 2024,
    arXiv:2405.20320, section 4.1).
    """

    steepness: float = 4.0

    @override
    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        u = randomness.rand(purpose, (count,), device)
        return 0.5 + torch.asinh((2 * u - 1) * sinh(self.steepness / 2)) / self.steepness


SHIFT = 3.0
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0


def time_grid(steps: int, kind: TimeGrid = "uniform", start: float = 1.0) -> list[float]:
    """Return the times that bound ``steps`` intervals, from the noise level ``start`` down to data (0).

    Args:
        steps: number of intervals.
        kind: ``uniform``; ``shifted``, denser near the noise by ``s t / (1 + (s - 1) t)`` with ``s = 3`` (Esser et al.
            2024, arXiv:2403.03206, section 5.3.2); or ``edm``, the noise levels of Karras et al. (2022,
            arXiv:2206.00364, eq. 5) as times ``sigma / (1 + sigma)``.
        start: the first time, in (0, 1].

    Returns:
        ``steps + 1`` decreasing times; the first is ``start`` and the last is 0.
    """
    if kind == "edm":
        # The lowest noise level is dropped: the last interval ends at no noise instead.
        highest = min(SIGMA_MAX, start / (1 - start)) if start < 1 else SIGMA_MAX
        lowest = min(SIGMA_MIN, highest / 2)
        roots = torch.linspace(highest ** (1 / RHO), lowest ** (1 / RHO), steps + 1, dtype=torch.float64)[:-1]
        sigma = roots**RHO
        times = [*(sigma / (1 + sigma)).tolist(), 0.0]
        return [start, *times[1:]]
    line = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    if kind == "shifted":
        line = SHIFT * line / (1 + (SHIFT - 1) * line)
    return [float(t) for t in start * line]
