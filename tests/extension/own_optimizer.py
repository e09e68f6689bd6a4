"""An optimizer of one's own: descent by the sign of the momentum, without decay of biases."""

from collections.abc import Iterable

import torch
from torch import nn

from rectified_flow import register


class SignDescent(torch.optim.Optimizer):
    """Descent by signs whose step size shrinks with a step count that is stored in the parameter groups."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            rate = group["lr"] / group["count"] ** 0.5
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - rate * group["weight_decay"]).sub_(momentum.sign(), alpha=rate)


@register(role="optimizer", needs=("lr",))
def sign_descent(
    parameters: Iterable[tuple[str, nn.Parameter]], lr: float, weight_decay: float = 0.0, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Return the optimizer over parameters by name."""
    named = list(parameters)
    groups = [
        {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return SignDescent(groups, {"lr": lr, "momentum": momentum})
