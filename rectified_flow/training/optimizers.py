"""Optimizers by name, and learning-rate schedules."""

from collections.abc import Callable, Iterable
from math import cos, pi

import torch
from torch import nn

from rectified_flow.errors import UsageError
from rectified_flow.flags import choose
from rectified_flow.registry import register
from rectified_flow.runs.config import TrainingConfig

OPTIMIZER_FLAGS = ("optimizer", "optimizer_options", "learning_rate", "adam_betas", "weight_decay")
"""Flags of a run that only the optimizer uses."""
SCHEDULE_FLAGS = ("lr_warmup_steps", "lr_decay")
"""Flags of a run that only :func:`build_schedule` uses."""

NamedParameters = Iterable[tuple[str, nn.Parameter]]
BuildOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]
"""A function of the trained parameters with their names, such as ``partial(torch.optim.SGD, lr=0.1)``.

The learning rates of the optimizer's groups are the peaks of the schedule. Its state is saved by the names of the
parameters, and may consist of tensors, numbers and None.
"""
LrSchedule = Callable[[int, int], float]
"""The factor of the learning rates at the update after ``updates`` updates, in a run of ``total`` of them."""


def trained_parameters(flow: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name.

    Raises:
        UsageError: if no parameter is trained, or a trained parameter has less than 32 bits.
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


@register(role="optimizer")
def adamw(
    parameters: NamedParameters,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused, eps=eps)


def find_optimizer(config: TrainingConfig, *, fused: bool) -> BuildOptimizer:
    """Return the builder of the registered optimizer that ``--optimizer`` names, with the flags of the run.

    A registered builder takes the trained parameters with their names. It gets those of the peak learning rate ``lr``,
    the decays ``betas`` of the averages of the gradient and of its square, ``weight_decay`` and ``fused`` that it has
    a parameter for, and the entries of ``--optimizer_options``.

    Args:
        config: the run's flags.
        fused: whether to build an optimizer whose step is one kernel. A fused optimizer reads ``found_inf``, so it
            can skip a step whose gradient is not finite without a wait for the device. Other optimizers need the wait.

    Raises:
        UsageError: if no optimizer is registered under that name, or an option does not fit it.
    """
    choice = choose("optimizer", "optimizer", config.optimizer, config.optimizer_options)
    flags = {"lr": config.learning_rate, "betas": config.adam_betas, "weight_decay": config.weight_decay}
    return lambda parameters: choice.build(parameters=parameters, **flags, fused=fused)


def build_schedule(config: TrainingConfig) -> LrSchedule:
    """Build the schedule of a linear warm-up, and then the decay that ``--lr_decay`` names.

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
