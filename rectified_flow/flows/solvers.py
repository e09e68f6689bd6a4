"""Solvers of dx/dt = v(x, t), from noise to data.

A rectified flow's paths are nearly straight, so few steps of a fixed solver suffice. Euler takes the velocity at the
start of an interval for all of it; its error falls with the number of steps. Midpoint takes the velocity halfway, Heun
the mean of the velocities at both ends; their errors fall with its square, at two network calls a step. The multistep
solvers extrapolate from the step before, and so have order 2 at one call a step. The stochastic solver is no
integrator: it replaces some of the noise at each step, which corrects earlier errors and adds variance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import copysign, exp, inf, isfinite, log, sqrt

import torch
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.condition import ConditionSpecs, Values, chosen, none_of
from rectified_flow.errors import UsageError
from rectified_flow.flows import Solver

Velocity = Callable[[Tensor, float], Tensor]
Step = Callable[[Tensor, float, float], Tensor]
"""A function of ``x``, its time and the next time that returns ``x`` at the next time."""
Watch = Callable[[float, Tensor], object]
Inpaint = Callable[[Tensor, float], Tensor]
"""A function that returns ``x`` at a time with the part that is not generated put back."""

AUTOGUIDANCE, AUTOGUIDED = 2.5, (0.0, 0.9)
"""Default scale of autoguidance, and its interval. Above it, autoguidance shifts colours and adds copies."""
AUTOGUIDANCE_OF_PATHS = 1.5
"""Default scale of autoguidance for the paths of a teacher, at all times. The one for samples gave worse maps."""
CALLS_PER_STEP: dict[Solver, int] = {"euler": 1, "midpoint": 2, "heun": 2, "ab2": 1, "dpmpp_2m": 1, "stochastic": 1}
"""Network calls in one interval."""


def integrate(
    velocity: Velocity,
    x: Tensor,
    times: list[float],
    solver: Solver = "ab2",
    *,
    watch: Watch | None = None,
    inpaint: Inpaint | None = None,
    evaluate_at_data: bool = True,
) -> Tensor:
    """Integrate ``velocity`` from ``x`` ``[b, ...]`` at ``times[0]`` to ``times[-1]``, with one step per interval.

    Args:
        velocity: called with ``x`` and a time.
        x: initial value.
        times: falling from noise to data.
        solver: ``euler`` has order 1 and calls ``velocity`` once a step; ``midpoint`` and ``heun`` have order 2 and
            call it twice; ``ab2`` (Adams-Bashforth) and ``dpmpp_2m`` (DPM-Solver++(2M), by its name in k-diffusion)
            have order 2 and call it once. ``stochastic`` steps like Euler and replaces part of the noise that is left
            by a fresh draw, which keeps the distribution at each time and corrects errors made before (the generalised
            DDIM of Song et al. 2020, arXiv:2010.02502, eq. 12).
        watch: called with time and ``x`` at the start and after each interval.
        inpaint: see :func:`take_steps`.
        evaluate_at_data: whether ``velocity`` exists at time 0; if not, a step of ``heun`` that ends there is an Euler
            step.
    """
    steps: dict[Solver, Step] = {
        "euler": partial(_euler, velocity),
        "midpoint": partial(_midpoint, velocity),
        "heun": partial(_heun, velocity, evaluate_at_data),
        "ab2": _adams_bashforth(velocity),
        "dpmpp_2m": _data_prediction(velocity),
        "stochastic": partial(_stochastic, velocity),
    }
    return take_steps(steps[solver], x, times, watch, inpaint)


def take_steps(
    step: Step, x: Tensor, times: list[float], watch: Watch | None = None, inpaint: Inpaint | None = None
) -> Tensor:
    """Set ``x`` to ``step(x, t, t_next)`` in each interval of ``times``.

    Args:
        step: a step of the solver.
        x: initial value.
        times: see :func:`integrate`.
        watch: see :func:`integrate`.
        inpaint: called with ``x`` and the time after each interval; ``x`` is set to its result. With the known part of
            the data put back on its path, the rest is generated to match (Song et al. 2020, arXiv:2011.13456, I.2).
    """
    if watch is not None:
        watch(times[0], x)
    for t, t_next in pairwise(times):
        x = step(x, t, t_next)
        x = x if inpaint is None else inpaint(x, t_next)
        if watch is not None:
            watch(t_next, x)
    return x


def _euler(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    return x + (t_next - t) * velocity(x, t)


def _midpoint(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    dt = t_next - t
    return x + dt * velocity(x + dt / 2 * velocity(x, t), t + dt / 2)


def _heun(velocity: Velocity, evaluate_at_data: bool, x: Tensor, t: float, t_next: float) -> Tensor:
    dt, start = t_next - t, velocity(x, t)
    if t_next == 0 and not evaluate_at_data:
        return x + dt * start
    return x + dt / 2 * (start + velocity(x + dt * start, t + dt))


def _stochastic(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    v = velocity(x, t)
    clean, noise = x - t * v, x + (1 - t) * v
    renewed = 1 - exp((t_next - t) / t)
    fresh = randomness.randn(f"solver noise at {t_next:.6f}", x.shape, x.device)
    noise = sqrt(1 - renewed) * noise + sqrt(renewed) * fresh
    return (1 - t_next) * clean + t_next * noise


def _adams_bashforth(velocity: Velocity) -> Step:
    """Return the steps of Adams-Bashforth of order 2 for steps of different sizes.

    The velocity is extrapolated from the step before by a straight line, whose mean over the step is
    ``v + dt / (2 dt_last) (v - v_last)``. The first step is an Euler step: its error is of the order of the square
    of the step, and it is made once, so that the order is 2 without a second call.
    """
    last: tuple[float, Tensor] | None = None

    def step(x: Tensor, t: float, t_next: float) -> Tensor:
        nonlocal last
        v = velocity(x, t)
        t_last, v_last = last or (inf, v)
        last = t, v
        ratio = (t_next - t) / (t - t_last)
        return x + (t_next - t) * (v + ratio / 2 * (v - v_last))

    return step


def _data_prediction(velocity: Velocity) -> Step:
    """Return the steps of DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, algorithm 2) for straight paths.

    The velocity is ``v = (x - D) / t`` for the denoised ``D``. In terms of ``lam = log((1 - t) / t)``, half the
    logarithm of the signal-to-noise ratio, ``d(x / t) / dlam = exp(lam) D``. With a constant ``D``, the solution from
    ``t`` to ``s`` is ``x_s = s / t x + (1 - s / t) D = x + (s - t) v``, an Euler step. The solver draws a straight line
    in ``lam`` through the last two predictions and takes its value in the middle of the step, whose size in ``lam`` is
    ``h``: ``D + h / (2 h_last) (D - D_last)``. With ``u = (x - D_last) / t``, the velocity to the last prediction, this
    is the velocity ``v + h / (2 h_last) (v - u)``.

    At times 0 and 1, ``lam`` is infinite. After a step from there, the correction has the limit 0. The step that ends
    there is an Euler step, as extrapolation has no limit; at time 0 its result is ``D``.
    """
    last: tuple[float, Tensor] | None = None

    def step(x: Tensor, t: float, t_next: float) -> Tensor:
        nonlocal last
        v, lam = velocity(x, t), _log_ratio(t)
        lam_last, denoised_last = last or (inf, x)
        last = lam, x - t * v
        h = _log_ratio(t_next) - lam
        ratio = h / (lam - lam_last) if isfinite(h) else 0.0
        corrected = v + ratio / 2 * (v - (x - denoised_last) / t) if ratio else v
        return x + (t_next - t) * corrected

    return step


def _log_ratio(t: float) -> float:
    """Return the logarithm of ``(1 - t) / t``, infinite at 0 and 1."""
    return log((1 - t) / t) if 0 < t < 1 else copysign(inf, 0.5 - t)


@dataclass(frozen=True)
class Guidance:
    """Guidance of sampling: the velocity is extrapolated away from a less accurate prediction of it.

    Args:
        scale: scale of classifier-free guidance, from the unconditional to the conditional velocity. 1 is no guidance,
            0 no condition; above 1, the velocity is extrapolated beyond the conditional one.
        interval: first and last time at which guidance is applied; it helps at intermediate times (Kynkaanniemi et al.
            2024, arXiv:2404.07724); outside of it the velocity is the conditional one.
        scales: additional scales by condition. Each extrapolates from the velocity without this condition.
        autoguidance: scale of autoguidance, which extrapolates the velocity away from that of an earlier version of the
            flow for the same conditions (Karras et al. 2024, arXiv:2406.02507, eq. 3). 1 is no autoguidance. Together
            with another scale, classifier-free guidance is applied to the autoguided velocities.
        earlier: ``exact_velocity`` of the earlier version, for autoguidance.

    Raises:
        UsageError: if a number is not finite, or ``autoguidance`` lacks the earlier version.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    scales: Mapping[str, float] = field(default_factory=dict)
    autoguidance: float = 1.0
    earlier: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if not all(map(isfinite, (self.scale, self.autoguidance, *self.scales.values()))):
            raise UsageError(f"{self} has a number that is not finite: pass finite scales")
        if self.autoguidance != 1 and self.earlier is None:
            raise UsageError("`autoguidance` needs `earlier`: pass `exact_velocity` of an earlier version of the flow")


NO_GUIDANCE = Guidance()


def guided(predict: Callable[..., Tensor], kinds: ConditionSpecs, conditions: Values, guidance: Guidance) -> Velocity:
    """Return the velocity field of ``predict`` under guidance, with one call per time.

    For each scale ``w`` other than 1, the velocity is extrapolated by ``(w - 1)`` times its difference to the velocity
    without the conditions that the scale acts on (Ho & Salimans 2022, arXiv:2207.12598). Each such scale adds as many
    rows to the call as there are samples, unless these conditions are "none" for all samples. Autoguidance calls the
    earlier version of the flow with the same rows.

    Args:
        predict: called ``predict(x, t, **conditions)`` with ``x`` ``[b, ...]`` and times ``[b]``; returns the velocity
            ``[b, ...]``.
        kinds: kinds of the conditions by name.
        conditions: values by name ``[b, ...]``, for all times.
        guidance: scales and interval of the guidance.

    Raises:
        ValueError: if guidance is used without conditions, or a scale names an unknown condition.
    """
    known = chosen(kinds)
    for name in guidance.scales:
        if name not in known:
            remedy = f"pass {', '.join(known) or 'none'}"
            raise UsageError(f"`scales` of Guidance has {name}, which is not a condition of the network: {remedy}")
    free = known.keys() & conditions.keys()
    groups = [(guidance.scale, free), *((scale, {name}) for name, scale in guidance.scales.items())]
    groups = [(scale, names) for scale, names in groups if scale != 1]
    if any(not names or not names <= free for _, names in groups):
        raise ValueError("guidance needs a network that takes conditions: pass their values")
    none = none_of(kinds, {name: conditions[name] for _, names in groups for name in names})
    absent = {name for name in none if kinds[name].is_none(conditions[name]).all()}
    groups = [(scale, names) for scale, names in groups if not names <= absent]
    earliest, latest = guidance.interval

    def better(x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        own = predict(x, t, **conditions)
        if guidance.autoguidance == 1:
            return own
        assert guidance.earlier is not None, "see Guidance"
        return torch.lerp(guidance.earlier(x, t, **conditions), own, guidance.autoguidance)

    def velocity(x: Tensor, t: float) -> Tensor:
        acts = earliest <= t <= latest
        if not groups or not acts:
            return (better if acts else predict)(x, x.new_full((len(x),), t), **conditions)
        count = 1 + len(groups)
        every = {
            name: torch.cat((values, *((none[name].to(values) if name in names else values) for _, names in groups)))
            for name, values in conditions.items()
        }
        whole = better(torch.cat([x] * count), x.new_full((count * len(x),), t), **every)
        conditional, *without = whole.chunk(count)
        if len(groups) == 1:
            return torch.lerp(without[0], conditional, groups[0][0])
        changes = [(scale - 1) * (conditional - each) for (scale, _), each in zip(groups, without, strict=True)]
        return conditional + torch.stack(changes).sum(dim=0)

    return velocity
