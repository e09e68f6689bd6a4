"""Layers with their own forward-mode derivative (`torch.func.jvp`), since PyTorch's derivative does too much work.

PyTorch's derivative of a convolution also convolves the tangent of the weights. That tangent is zero here, so a third
of the work is wasted. PyTorch's derivative of a group norm is a chain of small operations that `torch.compile` cannot
handle. These layers do not support batching transforms (`torch.vmap`) while a derivative is taken.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectified_flow.networks import fused
from rectified_flow.networks.tangents import share, unpack, with_tangent


class Conv2d(nn.Conv2d):
    """A convolution whose weights have no tangent when its input has one."""

    def forward(self, x: Tensor) -> Tensor:
        value, tangent = unpack(x)
        convolve = self._convolve_on_gpu if fused.is_used(x) else self._conv_forward
        convolved = share(partial(convolve, value, self.weight, self.bias), has_tangent=tangent is not None)
        return convolved if tangent is None else with_tangent(convolved, convolve(tangent, self.weight, None))

    def _convolve_on_gpu(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (self.kernel_size, self.stride, self.padding, self.groups) == ((1, 1), (1, 1), (0, 0), 1):
            return fused.convolution_of_pixels(x, weight, bias)
        # Alone, so that this is what is kept for the backward pass: the bias is added where the result is read.
        convolved = self._conv_forward(x, weight, None)
        return convolved if bias is None else convolved + bias.to(convolved.dtype)[:, None, None]


class GroupNorm(nn.Module):
    """Group normalisation (Wu & He 2018, arXiv:1803.08494) in the precision of its input, also under autocast.

    The normalisation before scale and shift has a symmetric Jacobian. A tangent therefore passes through it like a
    gradient, in one fused operation.
    """

    def __init__(self, dim: int, max_groups: int = 32, min_channels: int = 4, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = math.gcd(dim, min(max_groups, max(1, dim // min_channels)))
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        if fused.is_used(x):
            with torch.autocast(x.device.type, enabled=False):
                return fused.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        value, tangent = unpack(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if tangent is None:
                return F.group_norm(value, self.groups, weight, bias, self.eps)
            batch, channels, *sides = value.shape
            size = batch, channels, math.prod(sides), self.groups
            result, mean, spread = torch.ops.aten.native_group_norm(value, weight, bias, *size, self.eps)
            gradient = torch.ops.aten.native_group_norm_backward
            change, *_ = gradient(tangent, value, mean, spread, None, *size, [True, False, False])
            return with_tangent(result, change * weight[:, None, None])


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x (scale + 1) + shift``, whose derivative has two operations instead of PyTorch's four."""
    factor = scale + 1
    (value, dx), (by, dby), (added, dadded) = unpack(x), unpack(factor), unpack(shift)
    if dx is None or dby is None or dadded is None:
        return torch.addcmul(shift, x, factor)
    change = torch.addcmul(torch.addcmul(dadded, dx, by), value, dby)
    return with_tangent(torch.addcmul(added, value, by), change)
