"""Classifier-free guidance of a velocity (Ho & Salimans 2022, arXiv:2207.12598)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rectified_flow.flows.solvers import Velocity


@dataclass(frozen=True)
class Guidance:
    """How much, and at which times, a velocity is pushed from the one without a label towards the one with it.

    Args:
        scale: 1 is no guidance, 0 no label, above 1 more than the label alone asks for.
        interval: first and last time at which it acts, as guidance helps in the middle of the way (Kynkaanniemi et al.
            2024, arXiv:2404.07724); outside of it the label alone rules.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)

    def acts_at(self, t: float) -> bool:
        """Whether the velocity at ``t`` is changed."""
        earliest, latest = self.interval
        return self.scale != 1 and earliest <= t <= latest


def guided(
    predict: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    labels: Tensor | None,
    no_label: int,
    guidance: Guidance,
) -> Velocity:
    """The velocity field of ``predict(x, t, labels)`` under guidance; one call a time, on twice the rows where it acts.

    Args:
        predict: takes ``x`` ``[b, ...]``, times ``[b]`` and labels ``[b]``, and returns the velocity ``[b, ...]``.
        labels: int64 ``[b]``, or None for all times.
        no_label: the number that stands for "no label".
        guidance: when and how much.
    """

    def velocity(x: Tensor, t: float) -> Tensor:
        if labels is None or not guidance.acts_at(t):
            return predict(x, x.new_full((len(x),), t), labels)
        both = torch.cat((labels, torch.full_like(labels, no_label)))
        with_label, without = predict(torch.cat((x, x)), x.new_full((2 * len(x),), t), both).chunk(2)
        return torch.lerp(without, with_label, guidance.scale)

    return velocity
