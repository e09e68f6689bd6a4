"""Optimizers by name, and learning-rate schedules."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow.parts import choose
from rectified_flow.registry import register
from rectified_flow.runs.training_config import TrainingConfig

NamedParameters = Iterable[tuple[str, nn.Parameter]]
BuildOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]
"""A function of the trained parameters with their names, such as ``partial(torch.optim.SGD, lr=0.1)``.

The learning rates of the optimizer's groups are the peaks of the schedule. Its state is saved by the names of the
parameters, and may consist of tensors, numbers and None.
"""
LrSchedule = Callable[[float, int], float]
"""The factor of the learning rates at the update after ``updates`` updates, in a run of ``total`` of them.

In a run with a clock, ``total`` is the planned number, and ``updates`` may be a fraction.
"""


@register(role="optimizer", needs=("lr", "fused"))
def adamw(
    parameters: NamedParameters,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 of a polynomial that quickly moves singular values near 1 (Jordan 2024)."""
ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Make rows or columns of matrices orthonormal, approximately, by Newton-Schulz iterations.

    Each iteration applies an odd polynomial, which changes the singular values of ``X`` alone and moves them towards 1,
    at the end to between 0.7 and 1.2. The polynomials are accumulated on the small Gram matrix ``X X^T``, and multiply
    ``X`` once. For a matrix of 64 rows and 576 columns, this takes about a third of the operations.

    Args:
        matrices: ``[n, rows, columns]`` in float32. Singular values below ``3.4**-5`` of the norm stay small.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT).mT
    a, b, c = NEWTON_SCHULZ
    matrices = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)
    products = matrices @ matrices.mT
    identity = torch.eye(len(products[0]), dtype=products.dtype, device=products.device)
    total = identity.expand_as(products)
    for number in range(ITERATIONS):
        polynomial = a * identity + b * products + c * products @ products
        total = polynomial if number == 0 else polynomial @ total
        if number < ITERATIONS - 1:
            products = polynomial @ products @ polynomial  # polynomials of one Gram matrix commute
    return total @ matrices


@register(role="optimizer", needs=("lr", "fused"))
def muon(
    parameters: NamedParameters,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    update_size: float = 0.4,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Build :class:`Muon` for matrices and filters, and AdamW for the other parameters, as one optimizer.

    AdamW also trains embeddings, and matrices of fewer than 8 rows or columns such as the filter of the output layer.
    """
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        by_kind[_is_matrix(name, parameter)].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": by_kind[True], "momentum": momentum, "update_size": update_size},
        {"params": by_kind[False], "betas": betas},
    ]
    # A CPU needs no synchronization, and its unfused kernels keep the rounding of earlier runs.
    fused = fused and all(parameter.is_cuda for group in groups for parameter in group["params"])
    return Muon([group for group in groups if group["params"]], lr=lr, weight_decay=weight_decay, fused=fused)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return "embedding" not in name and parameter.ndim >= 2 and min(parameter.flatten(1).shape) >= 8


# torch.optim.Muon takes matrices alone, one at a time in bf16: on a CPU, its update of filters takes 2.8 times as long.
class Muon(torch.optim.Optimizer):
    """Muon, which orthogonalizes the momentum of each matrix, and AdamW for other parameters.

    All singular values of an update of a matrix are about 1, so that rare directions of the gradient are learned as
    fast as frequent ones (Jordan 2024, kellerjordan.github.io/posts/muon). A filter is a matrix with a row for each of
    its output channels. The update is scaled to a fixed root mean square, as Liu et al. 2025 (arXiv:2502.16982, eq. 4)
    propose, so that one learning rate suits matrices and the parameters that AdamW trains.

    Args:
        groups: parameter groups. Muon updates the groups with ``momentum`` and ``update_size``, and AdamW the others,
            with its own arguments.
        lr: learning rate of all groups.
        weight_decay: decoupled weight decay of all groups.
        fused: use the fused AdamW, and skip steps marked by ``found_inf`` without synchronizing with the GPU.
    """

    found_inf: Tensor | None = None
    """Float on the device: with 1, a step of a fused optimizer changes nothing, whatever the gradient is."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, weight_decay: float, fused: bool = False) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "fused": fused}
        others = [group for group in groups if "momentum" not in group]
        self._adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=fused) if others else None
        super().__init__([group | defaults for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters by their gradients, in float32 also under autocast."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if "momentum" in group:
                with torch.autocast(group["params"][0].device.type, enabled=False):  # in bf16, iterations diverge
                    self._step_matrices(group)
        if self._adamw is not None:
            others = [group for group in self.param_groups if "momentum" not in group]
            for known, group in zip(self._adamw.param_groups, others, strict=True):
                known.update(group)
            self._adamw.state = self.state  # one state for all parameters, which is saved and restored as one
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["momentum"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        is_bad = None if self.found_inf is None else self.found_inf > 0
        if is_bad is not None:  # a gradient that equals its average does not change it
            gradients = [torch.where(is_bad, *pair) for pair in zip(averages, gradients, strict=True)]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        # Nesterov's momentum: interpolate between the gradient and its average once more.
        updates = torch._foreach_lerp(gradients, averages, group["momentum"])
        by_shape: defaultdict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter, update in zip(parameters, updates, strict=True):
            by_shape[tuple(update.flatten(1).shape)].append((parameter, update.flatten(1)))
        decay = group["lr"] * group["weight_decay"]
        torch._foreach_mul_(parameters, 1 - decay if is_bad is None else 1 - decay * ~is_bad)
        for shape, pairs in by_shape.items():  # equal shapes are updated together, which takes fewer operations
            changes = orthogonalize(torch.stack([update for _, update in pairs]))
            changes = changes if is_bad is None else changes.masked_fill(is_bad, 0)
            # A matrix with orthonormal rows has a root mean square of columns**-0.5.
            size = group["update_size"] * max(shape) ** 0.5
            shaped = [change.view(parameter.shape) for (parameter, _), change in zip(pairs, changes, strict=True)]
            torch._foreach_add_([parameter for parameter, _ in pairs], shaped, alpha=-group["lr"] * size)


def find_optimizer(config: TrainingConfig, *, fused: bool) -> BuildOptimizer:
    """Return the builder of the registered optimizer that the flag ``optimizer`` names, with the flags of the run.

    A registered builder takes the trained parameters with their names, what it needs of the peak learning rate ``lr``
    and ``fused``, and the arguments of that flag.
    """
    choice = choose("optimizer", "optimizer", config.optimizer)
    return lambda parameters: choice.build(parameters, lr=config.learning_rate, fused=fused)


def build_schedule(config: TrainingConfig) -> LrSchedule:
    """Build the schedule of a linear warm-up, and then the decay that ``lr_decay`` names.

    ``cosine`` falls to 0 at the run's last update (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, no restarts).
    ``rsqrt`` falls with the square root of the updates, from the end of the warm-up on (Vaswani et al. 2017,
    arXiv:1706.03762, eq. 3), and so does not depend on the run's length.
    """
    warmup = config.lr_warmup_steps

    def factor(updates: float, total: int) -> float:
        rise = min(1.0, (updates + 1) / max(1, warmup))
        if config.lr_decay == "cosine":
            share = max(0, updates - warmup) / max(1, total - warmup)
            return rise * 0.5 * (1 + cos(pi * min(1.0, share)))
        if config.lr_decay == "rsqrt":
            return rise * (max(1, warmup) / max(warmup, updates + 1)) ** 0.5
        return rise

    return factor


def warm_up_note(config: TrainingConfig, steps: int) -> str | None:
    """Return a sentence if the learning rate of a run of this many steps never reaches its peak, else None."""
    warm_up = config.lr_warmup_steps
    if warm_up <= steps:
        return None
    share = f"only {steps / warm_up:.0%} of `learning_rate` is reached in {steps:,} steps"
    return f"`lr_warmup_steps` is {warm_up:,}, so {share}: pass fewer"
