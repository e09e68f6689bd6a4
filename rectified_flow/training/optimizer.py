"""The default optimizer and learning-rate schedule; the trainer takes others in their place."""

from collections.abc import Callable, Iterable
from math import cos, pi

import torch
from torch import nn

from rectified_flow.runs.config import TrainingConfig

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Builds an optimizer over the trained parameters, with its peak learning rates."""

LrSchedule = Callable[[int, int], float]
"""The factor of the learning rates at the update after ``updates`` updates, in a run of ``total`` of them."""


def build_optimizer(
    config: TrainingConfig, parameters: Iterable[nn.Parameter], *, fused: bool
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=fused,
    )


def build_schedule(config: TrainingConfig) -> LrSchedule:
    """Linear warm-up, then the decay that ``--lr_decay`` names.

    ``cosine`` falls to 0 at the run's last update (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, no restarts).
    ``rsqrt`` falls with the square root of the updates, from the end of the warm-up on (Vaswani et al. 2017,
    arXiv:1706.03762, eq. 3), and so does not depend on the run's length.
    """
    warmup = config.lr_warmup_steps

    def factor(updates: int, total: int) -> float:
        rise = min(1.0, (updates + 1) / max(1, warmup))
        if config.lr_decay == "cosine":
            share = max(0, updates - warmup) / max(1, total - warmup)
            return rise * 0.5 * (1 + cos(pi * min(1.0, share)))
        if config.lr_decay == "rsqrt":
            return rise * (warmup / max(warmup, updates + 1)) ** 0.5
        return rise

    return factor
