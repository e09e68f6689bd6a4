"""Layers with cheap forward-mode derivatives (:func:`torch.func.jvp`), and values that two passes share.

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

LEVEL = 0  # the index of PyTorch's only level of forward-mode derivatives


GROUP = (2, 3, 4)  # the sides of ``[b, g, c, h, w]`` that a group is normalised over


@dataclass
class _Passes:
    kept: list[Tensor] | None = None
    """Values that the first pass has computed."""
    reused: Iterator[Tensor] | None = None
    """The same values in the second pass."""
    count: int = 0
    """Rows of the second pass."""


_passes = _Passes()


def unpack(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the value of ``x`` and its tangent, if it has one."""
    # Without an explicit level, the compiler would look it up once, find none, and treat that as a constant.
    value, tangent = forward_ad.unpack_dual(x, level=LEVEL if torch.compiler.is_compiling() else None)
    return value, tangent


def with_tangent(value: Tensor, tangent: Tensor) -> Tensor:
    """Return ``value`` with a tangent."""
    return forward_ad.make_dual(value, tangent, level=LEVEL)


@contextmanager
def keeping_values(*, wanted: bool = True) -> Iterator[list[Tensor]]:
    """Keep shared values of the block in the list, if wanted, for :func:`reusing_values`."""
    kept: list[Tensor] = []
    _passes.kept = kept if wanted else None
    try:
        yield kept
    finally:
        _passes.kept = None


def keep_no_more() -> None:
    """Stop keeping values, for code whose values are freed after it; the second pass computes the later ones again."""
    _passes.kept = None


@contextmanager
def reusing_values(kept: list[Tensor], count: int) -> Iterator[None]:
    """Take shared values of the block from the first ``count`` rows of those in ``kept``, in their order.

    The network and its draws must be the same as in the pass that kept them, and the inputs its first rows.
    """
    _passes.reused, _passes.count = iter(kept), count
    try:
        yield
    finally:
        _passes.reused = None


def share(compute: Callable[[], Tensor], *, has_tangent: bool) -> Tensor:
    """Return the value ``[b, ...]`` of ``compute``. With a tangent, reuse the value kept by the first pass."""
    if _passes.kept is not None:
        value = compute()
        _passes.kept.append(value.detach())
        return value
    kept = next(_passes.reused, None) if has_tangent and _passes.reused is not None else None
    # A copy: PyTorch wants a tangent laid out like its value.
    return compute() if kept is None else kept[: _passes.count].clone()


class Conv2d(nn.Conv2d):
    """A convolution whose weights have no tangent when its input has one."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x`` ``[b, c, h, w]``, and its tangent without the bias."""
        value, tangent = unpack(x)
        convolve = partial(self._conv_forward, value, self.weight, self.bias)
        convolved = share(convolve, has_tangent=tangent is not None)
        return convolved if tangent is None else with_tangent(convolved, self._conv_forward(tangent, self.weight, None))


class GroupNorm(nn.Module):
    """Group normalisation (Wu & He 2018, arXiv:1803.08494) in the precision of its input, also under autocast.

    The normalisation before scale and shift has a symmetric Jacobian. A tangent therefore passes through it like a
    gradient, in one fused operation.

    In code compiled for a GPU, PyTorch's operation would keep a copy in
    float32 and return a gradient that is not channels-last. The same function written as moments and a product moves
    10% fewer bytes in a step (docs/measurements/speed.md). On a CPU it would be slower and round differently.
    """

    def __init__(self, dim: int, max_groups: int = 32, min_channels: int = 4, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = math.gcd(dim, min(max_groups, max(1, dim // min_channels)))
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[b, c, h, w]`` over the pixels and channels of each group."""
        with torch.autocast(x.device.type, enabled=False):
            if is_compiled_for_gpu(x):
                return self._from_moments(x)
            value, tangent = unpack(x)
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            if tangent is None:
                return F.group_norm(value, self.groups, weight, bias, self.eps)
            if value.is_cuda:  # torch before pytorch/pytorch#186414 (June 2026) refuses other layouts there
                value, tangent = value.contiguous(), tangent.contiguous()
            batch, channels, *sides = value.shape
            size = batch, channels, math.prod(sides), self.groups
            result, mean, spread = torch.ops.aten.native_group_norm(value, weight, bias, *size, self.eps)
            gradient = torch.ops.aten.native_group_norm_backward
            change, *_ = gradient(tangent, value, mean, spread, None, *size, [True, False, False])
            return with_tangent(result, change * weight[:, None, None])

    def _from_moments(self, x: Tensor) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        grouped = x.to(precise).unflatten(1, (self.groups, -1))
        mean, variance = _moments(grouped)
        weight, bias = (each.to(precise).view(self.groups, -1, 1, 1) for each in (self.weight, self.bias))
        factor = (variance + self.eps).rsqrt() * weight
        return torch.addcmul(bias - mean * factor, grouped, factor).to(x.dtype).flatten(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the attention of queries ``[b, n, p, d]`` to keys and values (Vaswani et al. 2017, arXiv:1706.03762).

    Args:
        q: queries ``[b, n, p, d]``.
        k: keys ``[b, n, m, d]``.
        v: values ``[b, n, m, d]``.
        mask: bool ``[b, 1, 1, m]``, true for the keys that are attended to; None for all.

    PyTorch's fused kernels have no forward-mode derivative. In code compiled for a GPU, passes without tangents use
    them, since the weights ``[b, n, p, p]`` are the largest tensors of a network with attention.
    """
    if is_compiled_for_gpu(q) and unpack(q)[1] is None:
        return F.scaled_dot_product_attention(q, k, v, mask)
    logits = q * q.shape[-1] ** -0.5 @ k.mT
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(dim=-1).to(v.dtype) @ v


def is_compiled_for_gpu(x: Tensor) -> bool:
    """Return whether ``x`` is on a GPU, in code that is being compiled."""
    return torch.compiler.is_compiling() and x.device.type == "cuda"


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of ``x`` ``[b, g, c, h, w]`` over its last three sides."""
    value, tangent = unpack(x)
    # Two calls: the gradient of the variance needs the mean, and the compiler then finds it computed already.
    mean = share(lambda: value.mean(dim=GROUP, keepdim=True), has_tangent=tangent is not None)
    variance = share(lambda: value.var(dim=GROUP, keepdim=True, correction=0), has_tangent=tangent is not None)
    if tangent is None:
        return mean, variance
    # PyTorch's derivative of the variance would compute the mean again, in a kernel of its own.
    change = 2 * ((value - mean) * tangent).mean(dim=GROUP, keepdim=True)
    return with_tangent(mean, tangent.mean(dim=GROUP, keepdim=True)), with_tangent(variance, change)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``x (scale + 1) + shift``, whose derivative has two operations instead of PyTorch's four."""
    factor = scale + 1
    (value, dx), (by, dby), (added, dadded) = unpack(x), unpack(factor), unpack(shift)
    if dx is None or dby is None or dadded is None:
        return torch.addcmul(shift, x, factor)
    change = torch.addcmul(torch.addcmul(dadded, dx, by), value, dby)
    return with_tangent(torch.addcmul(added, value, by), change)
