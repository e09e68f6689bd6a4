"""Mean flow: learn the average velocity over an interval, and generate in one step.

The average velocity ``u(x_t, r, t)`` over ``[r, t]`` satisfies the mean flow identity ``u + (t - r) du/dt = v``, where
``du/dt`` is taken along the flow with ``r`` fixed (Geng et al. 2025, arXiv:2505.13447, eq. 6). The residual is

    V = u + (t - r) * stopgrad(derivative of u along w),      loss on V - v,

with the conditional velocity as the direction ``w``, or the network's own; the derivative is a forward-mode product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from typing_extensions import override

from rectified_flow.condition import Values, all_none, chosen, none_of
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flows import ObjectiveName, Share
from rectified_flow.flows.flow import FLOW_NEEDS, expand
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.times import LogitNormal, TimeDistribution
from rectified_flow.networks import forward_mode as tangents
from rectified_flow.registry import register


@register(role="flow", needs=(*FLOW_NEEDS, "time_distribution", "guidance_scale"))
class MeanFlow(FlowMap):
    """A flow map that is learned from data by the mean flow identity.

    Args:
        network: called ``network(x, t, r=r, **conditions)``; forward mode must pass through it.
        objective: ``mean_flow``, whose derivative is along the conditional velocity (arXiv:2505.13447, eq. 10), or
            ``improved_mean_flow``, along the network's own ``u(x, t, t)`` (Geng et al. 2025, arXiv:2512.02012).
        mean_fraction: share of the rows with ``r < t``; with 0 this is rectified flow.
        time_distribution: distribution of ``t``.
        earlier_distribution: distribution of ``r``. A draw above ``t`` is replaced by ``t``.
        guidance_scale: guidance scale of the target velocity (arXiv:2505.13447, section 4.2); needs a network with
            conditions and ``condition_dropout``. Rows without conditions are not guided.
        guidance_mixing: share of the network's own conditional velocity in the target; the effective scale is
            ``guidance_scale / (1 - guidance_mixing)``.
        settings: further arguments of :class:`FlowMap`.

    Raises:
        ValueError: if guidance is used without conditions.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        objective: ObjectiveName = "improved_mean_flow",
        mean_fraction: Share = 0.5,
        time_distribution: TimeDistribution | None = None,
        earlier_distribution: TimeDistribution | None = None,
        guidance_scale: float = 1.0,
        guidance_mixing: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.guided = guidance_scale != 1 or guidance_mixing != 0
        if self.guided and not chosen(self.conditions):
            raise ValueError("guidance needs a network that takes conditions")
        self.objective, self.mean_fraction = objective, mean_fraction
        self.time_distribution = time_distribution or LogitNormal(-0.6, 1.6)
        self.earlier_distribution = earlier_distribution or LogitNormal(-4.0, 1.6)
        self.guidance_scale, self.guidance_mixing = guidance_scale, guidance_mixing

    def forward(self, **batch: Tensor) -> Tensor:
        """Draw noise and intervals for a batch and return the scalar loss; see :meth:`Flow.draw_batch`.

        The first ``mean_fraction`` of the rows gets ``r < t``: the same count on every rank, and, as ranks hold
        strided rows of the global batch, the same rows on any number of them if that count is a whole number.

        Raises:
            UsageError: if the network has an operation without a forward-mode derivative, such as fused attention.
        """
        x_0, noise, conditions = self.draw_batch(batch)
        t = self.time_distribution.draw(len(x_0), x_0.device)
        earlier = self.earlier_distribution.draw(len(x_0), x_0.device, "earlier time")
        count = self.rows_of(self.mean_fraction, len(x_0))
        r = torch.cat((torch.minimum(earlier[:count], t[:count]), t[count:]))
        try:
            loss, mean_square = self.loss(x_0, noise, t, r, conditions, count)
        except NotImplementedError as error:
            if "forward AD" not in str(error):
                raise
            name, found = type(self.network).__name__, first_line(error).rstrip(".")
            remedy = "write attention as matmul and softmax, or call it inside sdpa_kernel(SDPBackend.MATH)"
            raise UsageError(f"`network` {name} has no forward-mode derivative ({found}): {remedy}") from error
        self.logged = {"unweighted_loss": mean_square}
        return loss

    @override
    def loss(
        self, x_0: Tensor, noise: Tensor, t: Tensor, r: Tensor, conditions: Values, count: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean squared error, given every draw.

        The residual is ``V - v``. Only ``u`` has a gradient: the derivative is taken without one, since its gradient
        would need second derivatives of the network, and the identity holds at the optimum either way. Rows with
        ``r = t`` need no derivative, ``(t - r)`` being 0 there, so it is computed for the first ``count`` rows alone.
        The pass with gradient comes first and keeps values that the derivative needs again at the same points.

        Args:
            x_0: data ``[b, ...]``.
            noise: ``[b, ...]``.
            t: times ``[b]``.
            r: earlier times ``[b]``, equal to ``t`` in all rows after the first ``count``.
            conditions: values by name ``[b, ...]``, dropped already.
            count: rows that need the derivative; all of them if not given.
        """
        count = len(x_0) if count is None else count
        x_0, weights = self.masked(x_0)
        times = expand(t, x_0)
        x_t = (1 - times) * x_0 + times * noise
        with tangents.keeping_values(wanted=count > 0) as kept:
            # With gradient, before all that is without: see autocast's cache.
            u = self.average_velocity(x_t, t, r, **conditions)
        with torch.no_grad():
            v = self._guide(noise - x_0, x_t, t, conditions)
            change = torch.zeros_like(u)
            if count > 0:
                # Copies: a compiled derivative wants its tangents laid out like their values.
                x_, v_, t_, r_ = (each[:count].clone() for each in (x_t, v, t, r))
                conditions_ = {name: values[:count] for name, values in conditions.items()}
                change_ = self._correction(x_, v_, t_, r_, conditions_, kept)
                change = torch.cat((change_, change[count:]))
        residual = u + change - v
        return self.weighted(residual if weights is None else residual * weights)

    def _correction(self, x: Tensor, v: Tensor, t: Tensor, r: Tensor, conditions: Values, kept: list[Tensor]) -> Tensor:
        """Return ``(t - r) du``, by the derivative of ``u(x, r, t)`` along ``(w, 0, 1)``.

        One forward-mode product costs about two calls; ``kept`` are values of the pass that computed ``u``.
        """
        direction = v if self.objective == "mean_flow" else self.average_velocity(x, t, t, **conditions)
        direction = torch.empty_like(x).copy_(direction)  # laid out like x, see above
        with tangents.reusing_values(kept, len(x)):
            _, derivative, *_ = jvp(
                lambda x, t, r: self.average_velocity(x, t, r, **conditions),
                (x, t, r),
                (direction, torch.ones_like(t), torch.zeros_like(r)),
            )
        return expand(t - r, x) * derivative

    def _guide(self, v: Tensor, x: Tensor, t: Tensor, conditions: Values) -> Tensor:
        if not self.guided or not conditions:
            return v
        unconditional = self.average_velocity(x, t, t, **none_of(self.conditions, conditions))
        guided = self.guidance_scale * v + (1 - self.guidance_scale - self.guidance_mixing) * unconditional
        if self.guidance_mixing:
            guided = guided + self.guidance_mixing * self.average_velocity(x, t, t, **conditions)
        return torch.where(expand(all_none(self.conditions, conditions), x), v, guided)
