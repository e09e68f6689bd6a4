"""A flow on its device, its network's weights in the memory format that convolutions there are fastest with."""

from typing import TypeVar

import torch
from torch import nn

from rectified_flow.networks.unet import Unet

M = TypeVar("M", bound=nn.Module)


def place(module: M, device: torch.device, precision: str) -> M:
    """Move ``module`` to the device, and give every :class:`Unet` in it, and so its activations, a memory format.

    That is channels last on a GPU, whose matrix units take images so, and on a CPU in float32; in bf16 what lies
    between a CPU's convolutions loses more than they gain (benchmarks/log.md).

    Args:
        module: a flow, or any other.
        device: where to.
        precision: ``no``, ``bf16`` or ``fp16``, as Accelerate has it.
    """
    last = device.type == "cuda" or (device.type == "cpu" and precision == "no")
    for each in module.modules():
        if isinstance(each, Unet):
            each.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    return module.to(device)
