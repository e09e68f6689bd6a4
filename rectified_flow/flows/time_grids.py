"""Time grids: the times between the steps of a solver, from noise to image."""

import torch

from rectified_flow.flows.config import TimeGrid

SHIFT = 3.0
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0


def time_grid(steps: int, kind: TimeGrid = "uniform", start: float = 1.0) -> list[float]:
    """The times that bound ``steps`` intervals, from the noise level ``start`` down to data (0).

    Args:
        steps: number of intervals.
        kind: ``uniform``; ``shifted``, denser near the noise by ``s t / (1 + (s - 1) t)`` with ``s = 3`` (Esser et al.
            2024, arXiv:2403.03206, section 5.3.2); or ``edm``, the noise levels of Karras et al. (2022,
            arXiv:2206.00364, eq. 5) as times ``sigma / (1 + sigma)``.
        start: the first time, in (0, 1].

    Returns:
        ``steps + 1`` decreasing times; the first is ``start`` and the last is 0.

    Raises:
        ValueError: if ``steps`` is not positive, or ``start`` not in (0, 1].
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; sampling needs at least 1")
    if not 0 < start <= 1:
        raise ValueError(f"the noise level is {start}; it must be above 0 and at most 1")
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
