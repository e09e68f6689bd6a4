"""Forms of some operations for compiled code on a GPU: the same functions, in steps that the compiler fuses better.

Launches and bytes bound a compiled step there. ``benchmarks/launches.py`` counts both. On a CPU these forms are slower,
and they round differently.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectified_flow.networks.forward_mode import share, unpack, with_tangent


def is_used(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU, in code that is being compiled."""
    return torch.compiler.is_compiling() and x.device.type == "cuda"


def shared(x: Tensor) -> Tensor:
    """``x``, whose value the pass that takes its tangent reads instead of computing it again."""
    if not is_used(x):
        return x
    value, tangent = unpack(x)
    known = share(lambda: value, has_tangent=tangent is not None)
    return known if tangent is None else with_tangent(known, tangent)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The group norm of ``x`` ``[b, c, h, w]``, without a copy to another memory format, forward and backward.

    Its operations have forward-mode derivatives, which the compiler can handle.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    grouped = x.to(precise).unflatten(1, (groups, -1))
    mean, variance = _moments(grouped)
    factor = (variance + eps).rsqrt() * weight.to(precise).view(groups, -1, 1, 1)
    added = bias.to(precise).view(groups, -1, 1, 1) - mean * factor
    return torch.addcmul(added, grouped, factor).to(x.dtype).flatten(1, 2)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``x`` over its last three sides."""
    value, tangent = unpack(x)
    sides: dict[str, Any] = {"dim": (2, 3, 4), "keepdim": True}
    # Two calls: the gradient of the variance needs the mean, and the compiler then finds it computed already.
    mean = share(lambda: value.mean(**sides), has_tangent=tangent is not None)
    variance = share(lambda: value.var(**sides, correction=0), has_tangent=tangent is not None)
    if tangent is None:
        return mean, variance
    # PyTorch's derivative of the variance would compute the mean again, in a kernel of its own.
    change = 2 * ((value - mean) * tangent).mean(**sides)
    return with_tangent(mean, tangent.mean(**sides)), with_tangent(variance, change)


def convolution_of_pixels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of ``x`` ``[b, c, h, w]`` with ``weight`` ``[d, c, 1, 1]`` as a matrix product.

    Its library call adds the bias, too; that of a convolution would leave it to another kernel.
    """
    return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def doubled(x: Tensor) -> Tensor:
    """``x`` ``[b, c, h, w]`` with each pixel repeated twice along both sides; its gradient has no atomic additions.

    Channels are last in memory. Else they would not be in its concatenation with others either, and convolutions would
    copy both.
    """
    pixels = x.movedim(1, -1)[:, :, None, :, None]
    return pixels.expand(-1, -1, 2, -1, 2, -1).flatten(3, 4).flatten(1, 2).movedim(-1, 1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of queries to keys and values, all ``[b, n, p, d]``; all three have tangents, or none."""
    (q, dq), (k, dk), (v, dv) = unpack(q), unpack(k), unpack(v)
    if dq is None or dk is None or dv is None:
        return F.scaled_dot_product_attention(q, k, v)
    scale = q.shape[-1] ** -0.5
    weights = (q * scale @ k.mT).softmax(dim=-1)
    # One product for the sum of two: what it returns is the largest tensor here.
    change = torch.cat((dq, q), dim=-1) * scale @ torch.cat((k, dk), dim=-1).mT
    change = weights * (change - (weights * change).sum(dim=-1, keepdim=True))
    weights, change = weights.to(v.dtype), change.to(v.dtype)
    return with_tangent(weights @ v, change @ v + weights @ dv)
