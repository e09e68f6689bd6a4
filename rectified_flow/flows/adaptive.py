"""Dormand-Prince 5(4), a solver that chooses its steps by an estimate of their error (Hairer et al. 1993, II.4)."""

from collections.abc import Callable, Iterator
from math import copysign

import torch
from torch import Tensor

from rectified_flow.errors import RunError

STAGES = (
    (1 / 5, (1 / 5,)),
    (3 / 10, (3 / 40, 9 / 40)),
    (4 / 5, (44 / 45, -56 / 15, 32 / 9)),
    (8 / 9, (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729)),
    (1.0, (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656)),
    (1.0, (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)),
)
"""The time of each network call as a fraction of the step, and the weights of the velocities of the calls before."""
ERROR_WEIGHTS = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""The weights of order 5 minus those of order 4."""
SMALLEST_STEP = 1e-8
"""Smaller steps raise an error: their times are not distinct in float32."""


class DormandPrince:
    """Steps of order 5 that all rows of a batch share, each with 6 calls of the velocity.

    A step is accepted if its estimated error is below the tolerance in every row. The error of a row is the root mean
    square of its elements, each divided by ``1 + |x|``. A row therefore meets the tolerance in any batch, though its
    steps, and so its rounding and its error below the tolerance, depend on the other rows.

    Args:
        velocity: called with ``x`` and a time.
        tolerance: largest error of a step, relative for large elements and absolute for small ones.
    """

    def __init__(self, velocity: Callable[[Tensor, float], Tensor], tolerance: float = 1e-4) -> None:
        self.velocity, self.tolerance = velocity, tolerance

    def step(self, x: Tensor, slope: Tensor, t: float, t_next: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``x`` at ``t_next`` by order 5, the velocity there, and the difference to order 4, each ``[b, ...]``.

        Args:
            x: value at ``t`` ``[b, ...]``.
            slope: velocity at ``t`` ``[b, ...]``.
            t: time of ``x``.
            t_next: a later or an earlier time.
        """
        slopes, there, dt = [slope], x, t_next - t
        for fraction, weights in STAGES:
            there = x + dt * _weighted(weights, slopes)
            slopes.append(self.velocity(there, t + fraction * dt))
        return there, slopes[-1], dt * _weighted(ERROR_WEIGHTS, slopes)

    def path(self, x: Tensor, times: list[float]) -> Iterator[Tensor]:
        """Yield ``x`` ``[b, ...]``, which is given at ``times[0]``, at each later one of rising or falling ``times``.

        Raises:
            RunError: if no step meets the tolerance, for example because the velocity is not finite.
        """
        t, slope, rejected = times[0], self.velocity(x, times[0]), False
        dt = self._first_step(x, slope, t, times[-1])
        for stop in times[1:]:
            while t != stop:
                # A step that ends within 1% of its size before a stop goes to the stop: no tiny step remains.
                t_next = stop if abs(stop - t) <= 1.01 * dt else t + copysign(dt, stop - t)
                there, slope_there, error = self.step(x, slope, t, t_next)
                size, dt = self._size(error, torch.maximum(x.abs(), there.abs())), abs(t_next - t)
                if size < 1:
                    dt *= min(1.0 if rejected else 10.0, 0.9 * max(size, 1e-10) ** -0.2)
                    x, slope, t, rejected = there, slope_there, t_next, False
                else:  # or not a number, for which max returns its first argument
                    dt, rejected = dt * max(0.2, 0.9 * size**-0.2), True
                    if not dt > SMALLEST_STEP:
                        raise RunError(
                            f"no step of --solver adaptive meets its tolerance at time {t:.3g}: pass another solver"
                        )
            yield x

    def _first_step(self, x: Tensor, slope: Tensor, t: float, end: float) -> float:
        """Return the size of a first step whose error is near the tolerance, with one call of the velocity."""
        place, speed = self._size(x, x), self._size(slope, x)
        guess = 1e-6 if min(place, speed) < 1e-5 else 0.01 * place / speed
        guess = max(SMALLEST_STEP, min(guess, abs(end - t)))
        ahead = copysign(guess, end - t)
        bend = self._size(self.velocity(x + ahead * slope, t + ahead) - slope, x) / guess
        largest = max(speed, bend)
        return min(100 * guess, (0.01 / largest) ** 0.2 if largest > 1e-15 else max(1e-6, guess * 1e-3))

    def _size(self, value: Tensor, x: Tensor) -> float:
        """Return the root mean square of ``value`` in tolerances at ``x``, of the row with the largest one."""
        relative = value / (self.tolerance * (1 + x.abs()))
        return relative.flatten(1).square().mean(dim=1).max().sqrt().item()


def _weighted(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    terms = (weight * slope for weight, slope in zip(weights, slopes, strict=True))
    return sum(terms, start=torch.zeros_like(slopes[0]))
