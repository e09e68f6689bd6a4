"""The likelihood of 8-bit pictures under a trained rectified flow, in bits per dimension.

Along the flow's ODE from data to noise, the density changes at a known rate (the instantaneous change of variables,
Chen et al. 2018, arXiv:1806.07366; Song et al. 2020, arXiv:2011.13456, section 4.3):
``log p(x_0) = log N(x_1) + integral from 0 to 1 of div v(x_t, t) dt``. The divergence is estimated as ``e . (J e)``
with random signs ``e``, which are the same along a path (Grathwohl et al. 2018, arXiv:1810.01367). The estimate is
unbiased, and costs one vector-Jacobian product.

A picture has 256 levels, and the density is that of continuous values, so each value is drawn uniformly within its
level (Theis et al. 2015, arXiv:1511.01844). The mean over such draws is at most the logarithm of the probability that
the flow gives to the 8-bit picture. Its negative is therefore an upper bound, in the unit of published figures.

The space of the data draws within levels, and tells the change of volume (:meth:`Space.dequantised
<rectified_flow.spaces.space.Space.dequantised>`). For data of floating point, the figure is that of the density.
"""

from collections.abc import Sequence
from functools import partial
from math import log, pi
from zlib import crc32

import torch
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.evaluation.evaluator import Comparison
from rectified_flow.evaluation.features import RealData, in_batches, stored_batch
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Velocity, take_steps
from rectified_flow.registry import register

MAX_PICTURES = 128  # largest number of training pictures, and of held-out pictures, that are measured


@register(role="score")
def likelihood(comparison: Comparison) -> dict[str, float]:
    """Estimate the mean bits per dimension of training and of held-out pictures, with as many steps as samples have.

    Returns:
        ``bits_per_dimension`` and ``heldout_bits_per_dimension``, and the standard error ``_error`` of each mean.

    Raises:
        UsageError: if the likelihood of the data is undefined for the flow.
        RunError: if an estimate is not finite.
    """
    evaluator, flow, numbers = comparison.evaluator, _checked(comparison.flow), dict[str, float]()
    times = cubic_times(comparison.options["steps"])
    for prefix, data in {"": evaluator.dataset, "heldout_": evaluator.held_out}.items():
        if data is None:
            continue
        rows = evaluator.order(data, MAX_PICTURES)
        estimate = partial(estimates, flow, data, rows, times, evaluator.batch_size, evaluator.seed)
        bits = map_over_ranks(evaluator.state, len(rows), estimate)
        numbers |= on_main(evaluator.state, partial(_summary, f"{prefix}bits_per_dimension", bits))
    return numbers


def _summary(name: str, bits: Tensor) -> dict[str, float]:
    if not bits.isfinite().all():
        raise RunError("the ODE of the flow diverges for some of the pictures: raise --steps")
    return {name: bits.mean().item(), f"{name}_error": bits.std().item() / len(bits) ** 0.5}


def _checked(flow: Flow) -> RectifiedFlow:
    """Return a flow with an ODE of the data alone, whose velocity exists at time 0."""
    whole = not flow.takes_source and not flow.space.has_missing
    if whole and isinstance(flow, RectifiedFlow) and flow.prediction != "clean":
        return flow
    raise UsageError(
        "--metric likelihood needs a rectified flow from noise to data without unknown values, and a prediction of the "
        "velocity or the noise"
    )


def estimates(
    flow: RectifiedFlow,
    data: RealData,
    rows: Sequence[int],
    times: list[float],
    batch_size: int,
    seed: int,
    numbers: Sequence[int],
) -> Tensor:
    """Return the bits per dimension of some of the rows of a dataset, float64 ``[n]``, under their conditions."""
    parts = []
    with torch.autocast(flow.device.type, enabled=False):
        for some in in_batches(numbers, batch_size, "likelihood"):
            batch = stored_batch(data, [rows[number] for number in some], flow)
            conditions = {name: batch[name] for name in flow.conditions if name in batch}
            parts.append(bits_per_dimension(flow, batch[flow.space.key], conditions, times, seed))
    return torch.cat(parts)


def cubic_times(steps: int) -> list[float]:
    """Return the cubes of ``steps + 1`` evenly spaced numbers: most of the change in density happens near time 0."""
    return [(step / steps) ** 3 for step in range(steps + 1)]


def bits_per_dimension(
    flow: RectifiedFlow, pictures: Tensor, conditions: Values, times: list[float], seed: int = 0
) -> Tensor:
    """Estimate the bits per dimension of pictures, each by one draw within its levels and one probe.

    The draws are a function of the seed and of the picture. So an estimate does not depend on the other pictures of the
    batch.

    Args:
        flow: a rectified flow.
        pictures: stored data ``[b, c, h, w]``.
        conditions: their conditions by name.
        times: the times that bound the steps, from 0 to 1.
        seed: seed of all draws.

    Returns:
        The estimates, float64 ``[b]`` on the CPU.
    """
    conditions, device = {name: each.to(flow.device) for name, each in conditions.items()}, flow.device
    with randomness.deterministic(randomness.Samples(seed, [crc32(each.numpy()) for each in pictures.cpu()]), device):
        x, log_volume = flow.space.dequantised(pictures.to(device))
        probe = 2.0 * randomness.randint("probe", 2, x.shape, device) - 1
        densities = log_density(flow, x, conditions, times, probe)
    return -densities / (x[0].numel() * log(2)) - log_volume


@torch.no_grad()
def log_density(flow: RectifiedFlow, x: Tensor, conditions: Values, times: list[float], probe: Tensor) -> Tensor:
    """Estimate the logarithm of the density at ``x``, by Runge-Kutta steps of order 4.

    Args:
        flow: a rectified flow whose velocity exists at time 0.
        x: data as the flow works on them ``[b, ...]``.
        conditions: their conditions by name.
        times: the times that bound the steps, from 0 to 1.
        probe: random signs ``[b, ...]``.

    Returns:
        The estimates in the units of ``x``, float64 ``[b]`` on the CPU.
    """

    def derivative(state: Tensor, t: float) -> Tensor:
        """Return the velocity and its divergence of states ``[b, d + 1]``: ``x``, and the integral so far."""
        now = state[:, :-1].reshape(x.shape).requires_grad_()
        with torch.enable_grad():
            velocity = flow.exact_velocity(now, now.new_full((len(now),), t), **conditions)
            [product] = torch.autograd.grad(velocity, now, probe)
        divergence = (product * probe).flatten(1).sum(dim=1, keepdim=True)
        return torch.cat((velocity.detach().flatten(1), divergence), dim=1)

    state = torch.cat((x.flatten(1), x.new_zeros(len(x), 1)), dim=1)
    with flow.evaluating():
        state = take_steps(partial(_runge_kutta, derivative), state, times).double().cpu()
    noise, integral = state[:, :-1], state[:, -1]
    return integral - 0.5 * (noise.square() + log(2 * pi)).sum(dim=1)


def _runge_kutta(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    dt, middle = t_next - t, (t + t_next) / 2
    first = velocity(x, t)
    second = velocity(x + dt / 2 * first, middle)
    third = velocity(x + dt / 2 * second, middle)
    return x + dt / 6 * (first + 2 * second + 2 * third + velocity(x + dt * third, t_next))
