"""Values and their tangents (`torch.func.jvp`), and the values that two passes over the same rows share.

Mean flow evaluates the network with gradient, and then takes its derivative at the first of the same rows. Layers that
:func:`share` their values compute them in the first pass only, and their tangents in the second.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

LEVEL = 0
"""The index of PyTorch's only level of forward-mode derivatives."""


@dataclass
class _Passes:
    kept: list[Tensor] | None = None
    """By the pass that computes."""
    reused: Iterator[Tensor] | None = None
    """By the pass that comes after, of which ``count`` rows."""
    count: int = 0


_passes = _Passes()


def unpack(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The value of ``x`` and its tangent, if it has one."""
    # Without an explicit level, the compiler would look it up once, find none, and treat that as a constant.
    value, tangent = forward_ad.unpack_dual(x, level=LEVEL if torch.compiler.is_compiling() else None)
    return value, tangent


def with_tangent(value: Tensor, tangent: Tensor) -> Tensor:
    """``value`` with a tangent."""
    return forward_ad.make_dual(value, tangent, level=LEVEL)


@contextmanager
def keeping_values(*, wanted: bool = True) -> Iterator[list[Tensor]]:
    """Inside the block, shared values are kept in the list, if wanted, for :func:`reusing_values`."""
    kept: list[Tensor] = []
    _passes.kept = kept if wanted else None
    try:
        yield kept
    finally:
        _passes.kept = None


def keep_no_more() -> None:
    """Before code whose values do not outlive it; the pass that reuses values computes the later ones again."""
    _passes.kept = None


@contextmanager
def reusing_values(kept: list[Tensor], count: int) -> Iterator[None]:
    """Inside the block, shared values are the first ``count`` rows of those in ``kept``, in their order.

    The network and its draws must be the same as in the pass that kept them, and the inputs its first rows.
    """
    _passes.reused, _passes.count = iter(kept), count
    try:
        yield
    finally:
        _passes.reused = None


def share(compute: Callable[[], Tensor], *, has_tangent: bool) -> Tensor:
    """A value ``[b, ...]``, computed now or in the pass before, which only a value with a tangent can be."""
    if _passes.kept is not None:
        value = compute()
        _passes.kept.append(value.detach())
        return value
    kept = next(_passes.reused, None) if has_tangent and _passes.reused is not None else None
    # A copy: PyTorch wants a tangent laid out like its value.
    return compute() if kept is None else kept[: _passes.count].clone()


from rectified_flow.networks import fused  # noqa: E402


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
