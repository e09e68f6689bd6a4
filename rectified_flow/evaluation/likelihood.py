"""The likelihood of 8-bit pictures under a trained rectified flow, in bits per dimension.

Along the flow's ODE from data to noise, the density changes at a known rate (the instantaneous change of variables,
Chen et al. 2018, arXiv:1806.07366; Song et al. 2020, arXiv:2011.13456, section 4.3):
``log p(x_0) = log N(x_1) + integral from 0 to 1 of div v(x_t, t) dt``. The divergence is estimated as ``e . (J e)``
with random signs ``e``, which are the same along a path (Grathwohl et al. 2018, arXiv:1810.01367). The estimate is
unbiased, and costs one vector-Jacobian product.

A picture has 256 levels, and the density is that of continuous values, so each value is drawn uniformly within its
level (Theis et al. 2015, arXiv:1511.01844). The mean over such draws is at most the logarithm of the probability that
the flow gives to the 8-bit picture. Its negative is therefore an upper bound, in the unit of published figures.

Measurements (:class:`rectified_flow.spaces.fields.Fields`) of integer type are treated alike. For those of floating
point, the figure is that of the density in physical units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log, pi
from zlib import crc32

import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import map_over_ranks
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.features import in_batches
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Velocity, take_steps
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.pixels import cropped
from rectified_flow.spaces.space import Space

LEVEL = 1 / 127.5
"""Distance of two levels of 8 bits in the units of :class:`rectified_flow.spaces.pixels.Pixels`."""


@dataclass(frozen=True)
class Pictures:
    """Pictures whose likelihood is measured.

    Args:
        data: the pictures.
        names: the name of each.
        conditional: whether the likelihood is that under the conditions of the pictures, instead of "none".
    """

    data: ImageDataset
    names: list[str]
    conditional: bool = True

    def read(self, flow: Flow, index: int) -> tuple[Tensor, Values]:
        """Return a picture, uint8 ``[1, c, h, w]``, and its conditions by name ``[1, ...]``."""
        known = self.data.condition_values([index]) if self.conditional else {}
        kinds = flow.conditions.items()
        conditions = {name: known[name] if name in known else kind.none(1, torch.device("cpu")) for name, kind in kinds}
        return self.data.read_entries([index])["images"], conditions


def measure(
    flow: RectifiedFlow, groups: Sequence[Pictures], *, steps: int, probes: int, batch_size: int, seed: int = 0
) -> list[Tensor]:
    """Estimate the bits per dimension of all pictures, a share on every process. Collective.

    Args:
        flow: a rectified flow on pixels.
        groups: the pictures.
        steps: number of steps of the solver.
        probes: number of independent estimates of each picture.
        batch_size: number of estimates that each process makes at once.
        seed: seed of all draws.

    Returns:
        The estimates of each group, float64 ``[n, probes]``.

    Raises:
        Interrupted: on every process, if a stop was requested on one.
    """
    rows = [(group, index) for group in groups for index in range(len(group.names))]
    times = time_grid(steps)

    def estimate(numbers: list[int]) -> Tensor:
        parts = []
        for some in in_batches(numbers, batch_size, "likelihood"):
            places = [divmod(number, probes) for number in some]
            read = [rows[row][0].read(flow, rows[row][1]) for row, _ in places]
            pictures = torch.cat([picture for picture, _ in read])
            conditions = {name: torch.cat([each[name] for _, each in read]) for name in flow.conditions}
            draws = [draw for _, draw in places]
            parts.append(bits_per_dimension(flow, pictures, conditions, times, draws, seed))
        return torch.cat(parts)

    estimates = map_over_ranks(PartialState(), len(rows) * probes, estimate).unflatten(0, (-1, probes))
    return list(estimates.split([len(group.names) for group in groups]))


def time_grid(steps: int) -> list[float]:
    """Return the cubes of ``steps + 1`` evenly spaced numbers: most of the change in density happens near time 0."""
    return [(step / steps) ** 3 for step in range(steps + 1)]


def bits_per_dimension(
    flow: RectifiedFlow, pictures: Tensor, conditions: Values, times: list[float], draws: Sequence[int], seed: int = 0
) -> Tensor:
    """Estimate the bits per dimension of pictures, each by one draw within its levels and one probe.

    The draws are a function of the seed, of the number of the draw, and of the picture. So an estimate does not depend
    on the other pictures of the batch.

    Args:
        flow: a rectified flow on pixels.
        pictures: uint8 ``[b, c, h, w]``.
        conditions: their conditions by name.
        times: the times that bound the steps, from 0 to 1.
        draws: the number of the draw of each picture; different draws are independent.
        seed: seed of all draws.

    Returns:
        The estimates, float64 ``[b]`` on the CPU.
    """
    conditions, device = {name: each.to(flow.device) for name, each in conditions.items()}, flow.device
    numbers = [randomness.mix(crc32(each.numpy()), draw) for each, draw in zip(pictures.cpu(), draws, strict=True)]
    with randomness.deterministic(randomness.Samples(seed, numbers), device):
        x, log_volume = _dequantised(flow.space, pictures.to(device))
        probe = 2.0 * randomness.randint("probe", 2, x.shape, device) - 1
        densities = log_density(flow, x, conditions, times, probe)
    return -densities / (x[0].numel() * log(2)) - log_volume


def _dequantised(space: Space, data: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return encoded data, drawn within the levels of integers, and the mean change of volume of each row in bits."""
    if not isinstance(space, Fields):
        x = space.encode(data)
        return x + LEVEL * (randomness.rand("dequantisation", x.shape, x.device) - 0.5), log(LEVEL, 2)
    values = cropped(data.float(), space.shape)
    if not data.is_floating_point():
        values = values + randomness.rand("dequantisation", values.shape, values.device) - 0.5
    log_volume = space.log_slope(values).double().flatten(1).mean(dim=1).cpu() / log(2)
    if not log_volume.isfinite().all():
        raise UsageError(
            "--likelihood: the transform has an infinite slope at a value of the fields, such as sqrt at 0"
        )
    return space.encode(values), log_volume


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
