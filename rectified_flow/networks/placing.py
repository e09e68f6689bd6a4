"""Networks on a device, with their weights in the order that its convolutions are fastest with."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def place(module: M, device: torch.device, precision: str) -> M:
    """Move ``module`` to the device and give its weights, and so all activations, the faster memory format.

    With channels last a GPU's matrix units take images as they are, and a CPU's float32 convolutions are faster, too;
    in bf16 what lies between a CPU's convolutions loses more than they gain (benchmarks/log.md).

    Args:
        module: any.
        device: where to.
        precision: ``no``, ``bf16`` or ``fp16``, as Accelerate has it.
    """
    channels_first = device.type == "cpu" and precision != "no"
    return module.to(device, memory_format=torch.contiguous_format if channels_first else torch.channels_last)  # type: ignore[call-overload]
