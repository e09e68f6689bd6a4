"""Distillation: learn the flow map of a trained flow from its own paths, by regression alone.

A path is a solution of the teacher's ODE from noise to data. Between two of its points, the average velocity is the
quotient of differences ``(x_t - x_r) / (t - r)``: no derivative of the network, and no noise of the data in the target.
With whole paths only, this is the distillation of Luhman & Luhman 2021, arXiv:2101.02388.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import expand
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.networks.conditions import Values
from rectified_flow.registry import register


@register
class DistilledFlow(FlowMap):
    """A flow map that is learned from the paths of a teacher.

    A batch has the data at the end of each path, and ``path`` ``[b, n, ...]``: its points at times 1, (n - 1) / n, ...,
    1 / n. Nothing is augmented, as the points belong together.

    Args:
        network: called ``network(x, t, r=r, **conditions)``.
        whole_fraction: share of the rows whose interval is the whole path, which one-step generation needs. Other rows
            end in any point, and start in any point before it.
        settings: those of :class:`FlowMap`.

    Raises:
        ValueError: if the fraction is not in [0, 1].
    """

    def __init__(self, network: nn.Module, *, whole_fraction: float = 0.5, **settings: Any) -> None:
        super().__init__(network, **settings)
        if not 0 <= whole_fraction <= 1:
            raise ValueError(f"whole_fraction is {whole_fraction}; it must be in [0, 1]")
        self.whole_fraction = whole_fraction

    def forward(self, **batch: Any) -> Tensor:
        """Draw an interval of each path and return the scalar loss; the first rows are those of whole paths."""
        if "path" not in batch:
            raise UsageError("a distilled flow learns from paths, and a batch has none: draw them with --teacher")
        path = batch["path"]
        x_0, _, conditions = self.draw_batch({**batch, "noise": path[:, 0]})
        steps, rows = path.shape[1], torch.arange(len(path), device=path.device)
        later = 1 + randomness.randint("time", steps, (len(path),), path.device)
        earlier = (later * randomness.rand("earlier time", (len(path),), path.device)).long()
        whole = rows < self.rows_of(self.whole_fraction, len(path))
        later, earlier = torch.where(whole, steps, later), torch.where(whole, 0, earlier)
        x_t, between = (path[rows, steps - index].float() for index in (later, earlier.clamp(min=1)))
        x_r = torch.where(expand(earlier == 0, x_0), x_0, between)
        loss, mean_square = self.loss(x_t, x_r, later / steps, earlier / steps, conditions)
        self.logged = {"unweighted_loss": mean_square}
        return loss

    def loss(self, x_t: Tensor, x_r: Tensor, t: Tensor, r: Tensor, conditions: Values) -> tuple[Tensor, Tensor]:
        """The loss and the mean squared error as a function of every draw.

        Args:
            x_t: points of paths ``[b, ...]``.
            x_r: later points of the same paths, nearer to the data.
            t: times of ``x_t`` ``[b]``.
            r: earlier times, of ``x_r``.
            conditions: values by name ``[b, ...]``, dropped already.
        """
        u = self.average_velocity(x_t, t, r, **conditions)
        return self.weighted(u - (x_t - x_r) / expand(t - r, x_t))
