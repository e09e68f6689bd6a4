"""Fixed-step solvers of dx/dt = v(x, t)."""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor

from rectified_flow.interruption import poll

Solver = Literal["euler", "midpoint", "heun"]
Velocity = Callable[[Tensor, float], Tensor]

SOLVERS: tuple[Solver, ...] = get_args(Solver)


def integrate(velocity: Velocity, x: Tensor, times: list[float], solver: Solver = "midpoint") -> Tensor:
    """Carry ``x`` ``[b, ...]`` from ``times[0]`` to ``times[-1]``, one step per interval.

    Euler has order 1 and calls ``velocity`` once a step; midpoint and Heun have order 2 and call it twice.
    """
    step = {"euler": _euler, "midpoint": _midpoint, "heun": _heun}[solver]
    for t, t_next in pairwise(times):
        poll()
        x = step(velocity, x, t, t_next - t)
    return x


def _euler(velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    return x + dt * velocity(x, t)


def _midpoint(velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    middle = x + dt / 2 * velocity(x, t)
    return x + dt * velocity(middle, t + dt / 2)


def _heun(velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    start = velocity(x, t)
    end = velocity(x + dt * start, t + dt)
    return x + dt / 2 * (start + end)
