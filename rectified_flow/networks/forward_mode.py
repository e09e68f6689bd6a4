"""Layers whose forward-mode derivative (`torch.func.jvp`) is written out, for PyTorch's own does too much.

Its derivative of a convolution convolves the tangent of the weights as well, which is zero here: a third of the work.
Its derivative of a group norm is a chain of small operations that the compiler cannot take. Batching transforms
(`torch.vmap`) do not pass through these layers while a derivative is taken.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import vjp

LEVEL = 0
"""PyTorch has one level of forward-mode derivatives, and this is its number."""


class Conv2d(nn.Conv2d):
    """A convolution whose weights have no tangent where its input has one."""

    def forward(self, x: Tensor) -> Tensor:
        value, tangent = _unpack(x)
        if tangent is None:
            return super().forward(value)
        return forward_ad.make_dual(super().forward(value), self._conv_forward(tangent, self.weight, None), level=LEVEL)


class GroupNorm(nn.Module):
    """Group normalisation (Wu & He 2018, arXiv:1803.08494) in the precision of its input, also under autocast.

    What it does before scale and shift has a symmetric Jacobian, so a tangent goes through it as a gradient does, in
    one fused operation.
    """

    def __init__(self, dim: int, max_groups: int = 32, min_channels: int = 4, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = math.gcd(dim, min(max_groups, max(1, dim // min_channels)))
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        value, tangent = _unpack(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if tangent is None:
                return F.group_norm(value, self.groups, weight, bias, self.eps)
            normed, pull_back, *_ = vjp(lambda x: F.group_norm(x, self.groups, eps=self.eps), value)
            (change,) = pull_back(tangent)
            scale, shift = weight[:, None, None], bias[:, None, None]
            return forward_ad.make_dual(torch.addcmul(shift, normed, scale), change * scale, level=LEVEL)


def _unpack(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The value of ``x`` and its tangent, if it has one."""
    # Left to find out the level, the compiler would keep for good that there was none when it first asked.
    value, tangent = forward_ad.unpack_dual(x, level=LEVEL if torch.compiler.is_compiling() else None)
    return value, tangent
