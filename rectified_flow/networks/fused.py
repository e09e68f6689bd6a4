"""Forms of some operations for compiled code on a GPU: the same functions, in steps that the compiler fuses better.

Launches and bytes bound a compiled step there. ``benchmarks/launches.py`` counts both. On a CPU these forms are slower,
and they round differently.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def is_used(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU, in code that is being compiled."""
    return torch.compiler.is_compiling() and x.device.type == "cuda"


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The group norm of ``x`` ``[b, c, h, w]``, without a copy to another memory format, forward and backward.

    Its operations have forward-mode derivatives, which the compiler can handle.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    grouped = x.to(precise).unflatten(1, (groups, -1))
    # Two calls: the gradient of the variance needs the mean, and the compiler then finds it computed already.
    mean = grouped.mean(dim=(2, 3, 4), keepdim=True)
    variance = grouped.var(dim=(2, 3, 4), correction=0, keepdim=True)
    factor = (variance + eps).rsqrt() * weight.to(precise).view(groups, -1, 1, 1)
    added = bias.to(precise).view(groups, -1, 1, 1) - mean * factor
    return torch.addcmul(added, grouped, factor).to(x.dtype).flatten(1, 2)


def convolution_of_pixels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of ``x`` ``[b, c, h, w]`` with ``weight`` ``[d, c, 1, 1]`` as a matrix product.

    Its library call adds the bias, too; that of a convolution would leave it to another kernel.
    """
    return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def doubled(x: Tensor) -> Tensor:
    """``x`` ``[b, c, h, w]`` with each pixel repeated twice along both sides; its gradient has no atomic additions."""
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4, 5).flatten(2, 3)
