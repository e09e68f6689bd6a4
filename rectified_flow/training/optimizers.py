"""The trained parameters, and the default optimizer and learning-rate schedule; the trainer takes others, too."""

from collections.abc import Callable, Iterable
from math import cos, pi

import torch
from torch import nn

from rectified_flow.errors import UsageError
from rectified_flow.runs.config import TrainingConfig

OPTIMIZER_FLAGS = ("learning_rate", "adam_betas", "weight_decay")
"""Flags of a run that only :func:`build_optimizer` uses."""
SCHEDULE_FLAGS = ("lr_warmup_steps", "lr_decay")
"""Flags of a run that only :func:`build_schedule` uses."""

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Builds an optimizer over the trained parameters, with its peak learning rates."""

LrSchedule = Callable[[int, int], float]
"""The factor of the learning rates at the update after ``updates`` updates, in a run of ``total`` of them."""


def trained_parameters(flow: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name.

    Raises:
        UsageError: if there is none, or one has less than 32 bits.
    """
    parameters = {name: p for name, p in flow.named_parameters() if p.requires_grad}
    if not parameters:
        raise UsageError("every parameter of the flow is frozen, so there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.element_size() < torch.float32.itemsize:
            raise UsageError(
                f"{name} would be trained in {str(parameter.dtype).removeprefix('torch.')}, in which small updates are "
                "lost: convert trained parameters with .float() (--mixed_precision bf16 still computes in bfloat16), "
                "or freeze it"
            )
    return parameters


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
