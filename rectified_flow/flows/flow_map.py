"""The map of a flow from one time to another: average velocities, with which a network generates in one step."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.arguments import checked
from rectified_flow.condition import Values
from rectified_flow.errors import UsageError
from rectified_flow.flows import WEIGHT_POWER, Share, Steps, Strength, TimeGrid
from rectified_flow.flows.flow import FLOW_NEEDS, Flow, expand
from rectified_flow.flows.solvers import Watch, take_steps
from rectified_flow.flows.times import time_grid
from rectified_flow.registry import register


def check_interval(network: nn.Module | type[nn.Module]) -> None:
    """Raise a UsageError if a network has no input ``r``, the time at which an interval ends, beside the time ``t``.

    The parameter must be named ``r``: a network that takes it in ``**conditions`` may ignore it.
    """
    parameters = signature(network.forward).parameters
    # A wrapper such as DataParallel hands all arguments on.
    if "r" not in parameters and all(each.kind is not each.VAR_POSITIONAL for each in parameters.values()):
        name = (network if isinstance(network, type) else type(network)).__name__
        needed = "has no input r, the end of an interval, which a one-step generator needs"
        raise UsageError(f"`network` {name} {needed}: add r to its forward, or train a rectified flow")


class FlowMap(Flow):
    """A generator in one step or few, whose network predicts average velocities. Subclasses define the loss.

    From ``x_t``, the flow comes to ``x_r = x_t - (t - r) u(x_t, r, t)``.

    Args:
        network: called ``network(x, t, r=r, **conditions)``.
        weight_power: rows are weighted by ``(squared error + weight_epsilon) ** -weight_power``, the squared error
            summed over elements (arXiv:2505.13447, section 4.3); 0 weights all alike, 1 makes the loss blind to size.
        weight_epsilon: see ``weight_power``.
        settings: further arguments of :class:`Flow`.

    Raises:
        UsageError: if the network has no input ``r``.

    Attributes:
        logged: values of the last forward pass to log beside the loss: ``unweighted_loss``, the mean squared error.
    """

    is_map = True
    default_steps = 1

    def __init__(
        self, network: nn.Module, *, weight_power: float = WEIGHT_POWER, weight_epsilon: float = 1e-3, **settings: Any
    ) -> None:
        check_interval(network)
        super().__init__(network, **settings)
        self.weight_power, self.weight_epsilon = weight_power, weight_epsilon
        self.logged: dict[str, Tensor] = {}

    def weighted(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of a residual ``[b, ...]``, and its mean square."""
        square = residual.square().flatten(1).sum(dim=1)
        weight = (square.detach() + self.weight_epsilon) ** -self.weight_power
        return (weight * square).mean(), square.detach().mean() / residual[0].numel()

    def rows_of(self, share: float, count: int) -> int:
        """Return the number of rows in a share of the ``count`` rows of a micro-batch, at least one of several.

        Raises:
            UsageError: if it is 0 in training, since it would then be 0 in every micro-batch.
        """
        rows = max(round(share * count), int(share > 0 and count > 1))
        if self.training and rows == 0 < share:
            raise UsageError(f"{share:g} of a micro-batch of {count} is less than one row: raise `batch_size`")
        return rows

    def average_velocity(self, x: Tensor, t: Tensor, r: Tensor, **conditions: Tensor) -> Tensor:
        """Return the predicted ``u(x, r, t)`` at ``x`` ``[b, ...]`` over ``[r, t]`` ``[b]``, in float32."""
        return self.predict(x, t, r=r, **conditions)

    @override
    def velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        return self.average_velocity(x, t, t, **conditions)

    @torch.no_grad()
    @checked
    @override
    def sample(
        self,
        count: int = 1,
        *,
        steps: Steps = 1,
        grid: TimeGrid | None = None,
        start: Tensor | None = None,
        strength: Strength = 1.0,
        mask: Tensor | None = None,
        noise: Tensor | None = None,
        watch: Watch | None = None,
        **conditions: Any,
    ) -> Tensor:
        """Generate data as the space decodes them, with one network call per step.

        Args:
            count: number of samples if no tensor is given.
            steps: intervals between noise and data, each crossed with its average velocity.
            grid: spacing of the times, see :func:`time_grid`; by default that of ``default_grid``.
            start: data ``[b, ...]`` to start from, as the space stores them, with noise up to ``strength``.
            strength: the time to start at, with ``start``.
            mask: bool ``[b, 1, h, w]``, true where data are generated; the rest is that of ``start``.
            noise: ``[b, ...]``, standard normal; drawn if not given.
            watch: called with time and ``x`` at the start and after each interval.
            conditions: tensors of values by name ``[b, ...]``; labels that are not given are drawn uniformly.

        Raises:
            UsageError: if an argument makes no sense.
        """
        times = time_grid(steps, grid or self.default_grid, strength if start is not None else 1.0)
        x, values = self.draw_start(count, conditions, noise=noise, start=start, strength=strength)

        def step(x: Tensor, t: float, r: float) -> Tensor:
            u = self.average_velocity(x, x.new_full((len(x),), t), x.new_full((len(x),), r), **values)
            return x - (t - r) * u

        with self.evaluating():
            return self.space.decode(take_steps(step, x, times, watch, self.inpainting(start, mask, x, times[0])))


@register(role="flow", needs=FLOW_NEEDS)
class DistilledFlow(FlowMap):
    """A flow map that is learned from the paths of a teacher.

    A batch has the data at the end of each path, and ``path`` ``[b, n, ...]``: its points from noise on, at the times
    of ``grid`` without the last. Nothing is augmented, as the points belong together.

    Args:
        network: called ``network(x, t, r=r, **conditions)``.
        whole_fraction: share of the rows whose interval is the whole path, for one-step generation.
        halves_fraction: share of the other rows whose interval is the first or the second half of the path, for
            two-step generation. The intervals of the rest end in any point, and start in any point before it.
        grid: spacing of the times of the paths (:func:`time_grid`), at which samples are generated, too.
        settings: further arguments of :class:`FlowMap`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        whole_fraction: Share = 0.5,
        halves_fraction: Share = 0.0,
        grid: TimeGrid = "uniform",
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.whole_fraction, self.halves_fraction, self.grid = whole_fraction, halves_fraction, grid

    @property
    @override
    def default_grid(self) -> TimeGrid:
        """The spacing of the times of the paths, so that two steps meet in their middle point."""
        return self.grid

    def forward(self, **batch: Tensor) -> Tensor:
        """Draw an interval of each path and return the scalar loss; the first rows are those of whole paths."""
        path = batch["path"]
        x_0, _, conditions = self.draw_batch({**batch, "noise": path[:, 0]})
        steps, rows = path.shape[1], torch.arange(len(path), device=path.device)
        earlier, later = self._draw_parts(steps, len(path), path.device)
        whole = rows < self.rows_of(self.whole_fraction, len(path))
        later, earlier = torch.where(whole, steps, later), torch.where(whole, 0, earlier)
        x_t, between = (path[rows, steps - index].float() for index in (later, earlier.clamp(min=1)))
        x_r = torch.where(expand(earlier == 0, x_0), x_0, between)
        times = torch.tensor(time_grid(steps, self.grid)[::-1], device=path.device)
        loss, mean_square = self.loss(x_t, x_r, times[later], times[earlier], conditions)
        self.logged = {"unweighted_loss": mean_square}
        return loss

    def _draw_parts(self, steps: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices of the points at the ends and starts of parts, 0 for the data, int64 ``[count]`` each."""
        later = 1 + randomness.randint("time", steps, (count,), device)
        earlier = (later * randomness.rand("earlier time", (count,), device)).long()
        if self.halves_fraction == 0 or steps == 1:
            return earlier, later
        is_half = randomness.rand("is half", (count,), device) < self.halves_fraction
        is_first, middle = randomness.rand("half", (count,), device) < 0.5, steps // 2
        earlier = torch.where(is_half, torch.where(is_first, middle, 0), earlier)
        return earlier, torch.where(is_half, torch.where(is_first, steps, middle), later)

    @override
    def loss(self, x_t: Tensor, x_r: Tensor, t: Tensor, r: Tensor, conditions: Values) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean squared error, given every draw.

        Args:
            x_t: points of paths ``[b, ...]``.
            x_r: later points of the same paths, nearer to the data.
            t: times of ``x_t`` ``[b]``.
            r: times of ``x_r`` ``[b]``, below ``t``.
            conditions: values by name ``[b, ...]``, dropped already.
        """
        u = self.average_velocity(x_t, t, r, **conditions)
        return self.weighted(u - (x_t - x_r) / expand(t - r, x_t))
