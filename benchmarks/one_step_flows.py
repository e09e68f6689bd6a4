"""The flows of ``one_step_study.py``: mean flow and reflow, with what the study tries beside the package's settings."""

import copy
import math
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.flows.flow import expand
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import LEAST_DIVISOR, RectifiedFlow
from rectified_flow.flows.times import Uniform
from rectified_flow.networks.forward_mode import Conv2d


class StudyFlow(MeanFlow):
    """A mean flow with what the study tries beside the package's own settings.

    Args:
        share: earlier times are uniform shares of t.
        clean: the network predicts the clean picture, and ``u = (x - network) / t`` (arXiv:2601.22158).
        along: which equation the average velocity is learned from: the derivative by the later time (``eulerian``,
            mean flow's own), or by the earlier one (``lagrangian``; Boffi et al. 2025, arXiv:2505.18825).
        teacher: a trained network whose velocity takes the place of the data's.
        growing: intervals grow to their length over the first four fifths of the training.
        warms: the derivative's weight grows from 0 to 1 over the first half of the training (arXiv:2410.11081).
        two_heads: the last layer predicts the velocity beside the average velocity, both are learned in all rows, and
            the derivative is along this velocity (arXiv:2512.02012).
        paths: a teacher's solutions from noise to data, ``[n, steps + 1, ...]``: intervals are between their points.
        whole: share of the intervals that are whole paths.
        matching: share of the batch that is matched with the teacher's distribution, see :meth:`_match`.
        pull: weight of the matching.
        edges: weight of the strength of edges in the pictures that whole paths lead to, see :func:`edge_strength`.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        share: bool = False,
        clean: bool = False,
        along: Literal["eulerian", "lagrangian"] = "eulerian",
        teacher: nn.Module | None = None,
        growing: bool = False,
        warms: bool = False,
        two_heads: bool = False,
        paths: Tensor | None = None,
        whole: float = 0.0,
        edges: float = 0.0,
        matching: float = 0.0,
        pull: float = 0.03,
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.warms, self.two_heads, self.edges = warms, two_heads, edges
        if two_heads:
            network.conv_out = doubled(network.conv_out)
        self.matching, self.pull = matching, pull
        self.critic = None if matching == 0 else copy.deepcopy(network).requires_grad_(True)
        self.velocities: list[Tensor] | None = None
        """With two heads, the velocities that the passes of a loss predicted."""
        self.share, self.clean, self.along = share, clean, along
        self.teacher = None if teacher is None else (teacher,)  # in a tuple, its weights are nobody's to train
        self.growing, self.paths, self.whole = growing, paths, whole

    def forward(self, **batch: Any) -> Tensor:
        x_0, noise, conditions = self.draw_batch(batch)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        if self.paths is not None:
            loss = self._follow(x_0, noise, t, self.paths)
            return loss if self.critic is None else loss + self._match(noise)
        earlier = self.earlier_distribution.draw(len(x_0), x_0.device, "earlier time")
        if self.share:
            earlier = t * Uniform().draw(len(x_0), x_0.device, "earlier time")
        if self.growing:
            earlier = t - (t - earlier) * min(1.0, self.progress / 0.8)
        count = round(self.mean_fraction * len(x_0))
        r = torch.cat((torch.minimum(earlier[:count], t[:count]), t[count:]))
        step = self.variant.step_at(self.progress)
        loss, mean_square = self.loss(x_0, noise, t, r, conditions, count, step > 0, t.new_tensor(step))
        self.logged = {"unweighted_loss": mean_square}
        return loss

    def loss(
        self, x_0: Tensor, noise: Tensor, t: Tensor, r: Tensor, *conditions_and_settings: Any
    ) -> tuple[Tensor, Tensor]:
        velocities = self.velocities = []
        loss, mean_square = super().loss(x_0, noise, t, r, *conditions_and_settings)
        self.velocities = None
        if self.two_heads:
            loss = loss + self.weighted(velocities[0] - (noise - x_0))[0]
        return loss, mean_square

    def _follow(self, x_0: Tensor, noise: Tensor, t: Tensor, paths: Tensor) -> Tensor:
        """The loss on the average velocities of paths, and in the other rows on the velocity."""
        count, steps = round(self.mean_fraction * len(x_0)), paths.shape[1] - 1
        which = randomness.randint("path", len(paths), (len(x_0),), x_0.device)[:count]
        end = 1 + randomness.randint("end", steps, (len(x_0),), x_0.device)[:count]
        start = (randomness.rand("start", (len(x_0),), x_0.device)[:count] * end).long()
        whole = torch.arange(count) < round(self.whole * count)
        start, end = torch.where(whole, 0, start), torch.where(whole, steps, end)
        x_t, x_r = paths[which, steps - end].float(), paths[which, steps - start].float()
        time, earlier = end / steps, start / steps
        x = torch.cat((x_t, torch.lerp(x_0, noise, expand(t, x_0))[count:]))
        target = torch.cat(((x_t - x_r) / expand(time - earlier, x_t), (noise - x_0)[count:]))
        u = self.average_velocity(x, torch.cat((time, t[count:])), torch.cat((earlier, t[count:])))
        square = (u - target).square().flatten(1).sum(dim=1)
        self.logged = {"unweighted_loss": square.detach().mean() / u[0].numel()}
        if self.edges:
            ends = (x - expand(torch.cat((time, t[count:])), x) * each for each in (u, target))
            found, wanted = (edge_strength(end[:count][whole]) for end in ends)
            further = self.edges * (found - wanted).square().sum(dim=1)
            square = square + torch.zeros_like(square).index_add(0, whole.nonzero()[:, 0], further)
        return ((square.detach() + self.weight_epsilon) ** -self.weight_power * square).mean()

    def _match(self, noise: Tensor) -> Tensor:
        """Distribution matching (Yin et al. 2023, arXiv:2311.18828): of what is drawn in one call, and of the teacher.

        A critic learns the velocity of what is drawn. Where it differs from the teacher's, the drawn pictures move.
        """
        assert self.critic is not None
        assert self.teacher is not None
        count = math.ceil(self.matching * len(noise))
        t = 0.02 + 0.96 * Uniform().draw(len(noise), noise.device, "time of matching")[:count]
        added = randomness.randn("noise of matching", noise.shape, noise.device)[:count]
        drawn = noise[:count] - self.average_velocity(noise[:count], torch.ones(count), torch.zeros(count))
        x_t = torch.lerp(drawn.detach(), added, expand(t, drawn))
        found = self.critic(x_t, t).float()
        with torch.no_grad():
            wanted = self.teacher[0](x_t, t).float()
            clean = x_t - expand(t, x_t) * wanted
            off = expand(t, x_t) * (wanted - found)
            off = off / expand((drawn - clean).abs().flatten(1).mean(dim=1), off)
        of_critic = (found - (added - drawn.detach())).square().mean()
        self.logged |= {"off": off.abs().mean(), "critic": of_critic.detach()}
        return self.pull * (off * drawn).flatten(1).sum(dim=1).mean() / drawn[0].numel() ** 0.5 + of_critic

    def average_velocity(self, x: Tensor, t: Tensor, r: Tensor, **conditions: Tensor) -> Tensor:
        output = super().average_velocity(x, t, r, **conditions)
        if self.two_heads:
            output, velocity = output.chunk(2, dim=1)
            if self.velocities is not None:
                self.velocities.append(velocity)
        return (x - output) / expand(t, x).clamp(min=LEAST_DIVISOR) if self.clean else output

    def velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        if self.teacher is None:
            return self.average_velocity(x, t, t, **conditions)
        output = self.teacher[0](x, t).float()
        return (x - output) / expand(t, x).clamp(min=LEAST_DIVISOR) if self.clean else output

    def _guide(self, v: Tensor, x: Tensor, t: Tensor, conditions: Values) -> Tensor:
        return v if self.teacher is None else self.velocity(x, t)

    def _blend(self, v: Tensor, x: Tensor, t: Tensor, conditions: Values) -> Tensor:
        if self.velocities:
            return self.velocities[0][: len(x)].detach()
        return v if self.teacher is not None else super()._blend(v, x, t, conditions)

    def _correction(
        self,
        u: Tensor,
        x: Tensor,
        v: Tensor,
        t: Tensor,
        r: Tensor,
        conditions: Values,
        step: Tensor | None,
        kept: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        if self.along == "eulerian":
            change, target = super()._correction(u, x, v, t, r, conditions, step, kept)
            return change * (min(1.0, self.progress / 0.5) if self.warms else 1.0), target
        gap = expand(t - r, x)
        _, slope, *_ = jvp(lambda r: self.average_velocity(x, t, r), (r,), (torch.ones_like(r),))
        return -gap * slope, self.velocity(x - gap * u, r)


def doubled(layer: Tensor | nn.Module) -> Conv2d:
    """A 3x3 convolution with twice the output channels of another, whose weights both halves have."""
    assert isinstance(layer, Conv2d)
    both = Conv2d(layer.in_channels, 2 * layer.out_channels, 3, padding=1)
    both.load_state_dict({name: torch.cat((values, values)) for name, values in layer.state_dict().items()})
    return both


def edge_strength(pictures: Tensor, levels: int = 3, window: int = 4) -> Tensor:
    """Local means of the absolute differences of neighbours, in four directions and on halved pictures, ``[b, n]``.

    An average of several pictures has weaker edges than each of them.
    """
    found = []
    for _ in range(levels):
        right, down = pictures[..., :-1, 1:], pictures[..., 1:, :-1]
        here, across = pictures[..., :-1, :-1], pictures[..., 1:, 1:]
        for change in (right - here, down - here, across - here, right - down):
            found.append(F.avg_pool2d((change.square() + 1e-4).sqrt(), window, window // 2).flatten(1))
        pictures = F.avg_pool2d(pictures, 2)
    return torch.cat(found, dim=1)


class Reflow(RectifiedFlow):
    """A rectified flow between the ends of paths, see :class:`StudyFlow`."""

    def __init__(self, network: nn.Module, *, paths: Tensor, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.paths = paths

    def draw_batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Values]:
        x_0, _, conditions = super().draw_batch(batch)
        which = randomness.randint("path", len(self.paths), (len(x_0),), x_0.device)
        return self.paths[which, -1].float(), self.paths[which, 0].float(), conditions


class AlongVelocity(RectifiedFlow):
    """The rectified flow of a mean flow's ``u(x, t, t)``."""

    def __init__(self, flow: MeanFlow) -> None:
        super().__init__(flow.network, space=flow.space)
        self.flow = (flow,)

    def exact_velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        return self.flow[0].average_velocity(x, t, t, **conditions)
