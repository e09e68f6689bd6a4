"""Gaussian random fields in two correlated channels, whose spectrum is known."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.measurements.scores import shell_means, wave_numbers


@dataclass(frozen=True)
class Law:
    """The distribution of the fields: normal and periodic, with power proportional to (k^2 + cutoff^2)^(-slope / 2)."""

    side: int
    """Side of the fields [px]."""
    slope: float = 3.0
    """Exponent of the decay of the power at large wave numbers."""
    cutoff: float = 2.0
    """Wave number below which the power is nearly constant [cycles per side]."""
    means: tuple[float, float] = (280.0, 0.0)
    """Mean of each channel, in its unit."""
    deviations: tuple[float, float] = (5.0, 1e-3)
    """Standard deviation of each channel, in its unit."""
    units: tuple[str, str] = ("K", "m/s")
    """Unit of each channel."""
    correlation: float = 0.6
    """Correlation of the channels at one pixel; at a distance, it is multiplied by the autocorrelation."""

    def power(self) -> Tensor:
        """Return the power of each mode, as a share of the variance, float64 ``[h, w]`` with the mean 1."""
        power = (wave_numbers(self.side, self.side).square() + self.cutoff**2) ** (-self.slope / 2)
        return power / power.mean()

    def spectrum(self) -> Tensor:
        """Return the expected spectrum of each channel in its squared unit, float64 ``[2, k]``."""
        return torch.tensor(self.deviations).double()[:, None].square() * shell_means(self.power()[None])


def draw_field(law: Law, seed: int, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draw the field of this number, ``[2, h, w]``: a function of the law, the seed and the number."""
    draw = randomness.generator("cpu", seed, "field", number)
    noise = torch.randn(2, law.side, law.side, generator=draw, dtype=torch.float64)
    noise[1] = law.correlation * noise[0] + (1 - law.correlation**2) ** 0.5 * noise[1]
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) * law.power().sqrt()).real
    means, deviations = (torch.tensor(each).double()[:, None, None] for each in (law.means, law.deviations))
    return (means + deviations * smooth).float().numpy()
