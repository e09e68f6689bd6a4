"""Move a flow to a device, with its network in the memory format in which convolutions are fastest on that device."""

from typing import TypeVar

import torch
from torch import nn

from rectified_flow.networks.unet import Unet

M = TypeVar("M", bound=nn.Module)


def to_device(module: M, device: torch.device, precision: str) -> M:
    """Move ``module`` to ``device``, and set the memory format of every :class:`Unet` in it and so of its activations.

    The format is channels-last on a GPU, whose matrix units read images in this order, and on a CPU in float32. On a
    CPU in bf16 it is contiguous: the operations between convolutions would lose more than the convolutions gain
    (benchmarks/log.md).

    Args:
        module: a flow, or any other module.
        device: the target device.
        precision: ``no``, ``bf16`` or ``fp16``, as in Accelerate.
    """
    last = device.type == "cuda" or (device.type == "cpu" and precision == "no")
    for each in module.modules():
        if isinstance(each, Unet):
            each.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    return module.to(device)
