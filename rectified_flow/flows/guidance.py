"""Classifier-free guidance of a velocity (Ho & Salimans 2022, arXiv:2207.12598)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rectified_flow.flows.solvers import Velocity
from rectified_flow.networks.conditions import Kinds, Values, none_of


@dataclass(frozen=True)
class Guidance:
    """How much, and at which times, a velocity is pushed from the unconditional one towards the conditional one.

    Args:
        scale: 1 is no guidance, 0 no condition, above 1 more than the conditions alone ask for.
        interval: first and last time at which it acts, as guidance helps in the middle of the way (Kynkaanniemi et al.
            2024, arXiv:2404.07724); outside of it the velocity is the conditional one.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)

    def acts_at(self, t: float) -> bool:
        """Whether the velocity at ``t`` is changed."""
        earliest, latest = self.interval
        return self.scale != 1 and earliest <= t <= latest


def guided(predict: Callable[..., Tensor], kinds: Kinds, conditions: Values, guidance: Guidance) -> Velocity:
    """The velocity field of ``predict`` under guidance; one call a time, on twice the rows where guidance acts.

    Args:
        predict: called ``predict(x, t, **conditions)`` with ``x`` ``[b, ...]`` and times ``[b]``; returns the velocity
            ``[b, ...]``.
        kinds: of the conditions.
        conditions: values by name ``[b, ...]``, for all times.
        guidance: when and how much.
    """

    def velocity(x: Tensor, t: float) -> Tensor:
        if not conditions or not guidance.acts_at(t):
            return predict(x, x.new_full((len(x),), t), **conditions)
        none = none_of(kinds, conditions)
        both = {name: torch.cat((values, none[name].to(values))) for name, values in conditions.items()}
        conditional, unconditional = predict(torch.cat((x, x)), x.new_full((2 * len(x),), t), **both).chunk(2)
        return torch.lerp(unconditional, conditional, guidance.scale)

    return velocity
